"""Scatter-add rows in a fixed order, also where several go to one row.

index_add_ has no fixed order on CUDA; index_put_(accumulate=True) of fp32 has none on a CPU with several
threads, which add atomically (from 32,768 elements on).
"""

from torch import Tensor


def add_rows(sum_TX: Tensor, rows_C: Tensor, x_CX: Tensor) -> None:
    """Add x_CX[c] to sum_TX[rows_C[c]]; X: any further dimensions."""
    if x_CX.is_cuda:
        sum_TX.index_put_((rows_C,), x_CX, accumulate=True)
    else:
        sum_TX.index_add_(0, rows_C, x_CX)
