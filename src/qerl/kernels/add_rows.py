"""Add rows to rows of a sum, some of which get several, in one order.

On CUDA index_add_ has none; on a CPU index_put_ of fp32 has none with several threads, which add atomically.
"""

from torch import Tensor


def add_rows(sum_TX: Tensor, rows_C: Tensor, x_CX: Tensor) -> None:
    """Add x_CX[c] to sum_TX[rows_C[c]]; X: any further dimensions."""
    if x_CX.is_cuda:
        sum_TX.index_put_((rows_C,), x_CX, accumulate=True)
    else:
        sum_TX.index_add_(0, rows_C, x_CX)
