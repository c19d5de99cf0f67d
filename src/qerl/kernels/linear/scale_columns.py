"""Multiply the columns of a product, which are the rows of its weight, by a factor each: INT8's scales.

    y[t, n] = factors[n] * x[t, n] + bias[n]        h[t, n] += factors[n] * x[t, n] + bias[n]

fp32 inside; y is in x's dtype, rounded once; h and its x are fp32. On a GPU one kernel reads and writes each
row once: PyTorch's operations broadcast factors at a fifth of the memory's rate (expert_rows.py).
"""

import struct

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

CASES = ((1, 8), (5, 96), (37, 2056), (9, 4608))  # T, N
_ROWS = 4  # of a thread


def reference(x_TN: Tensor, factors_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """Compute y in float64."""
    y_TN = x_TN.double() * factors_N.double()
    return y_TN if bias_N is None else y_TN + bias_N.double()


def scale_columns(x_TN: Tensor, factors_N: Tensor, bias_N: Tensor | None, out: Tensor) -> Tensor:
    """Write y to out, which may be x."""
    assert x_TN.shape == out.shape and factors_N.shape == x_TN.shape[1:] and x_TN.dtype == out.dtype
    if row_kernel.are_vectors(x_TN, out):
        return _launch("scale_columns", x_TN, factors_N, bias_N, out)
    torch.mul(x_TN, factors_N, out=out)
    return out if bias_N is None else out.add_(bias_N)


def add_scaled(h_TN: Tensor, x_TN: Tensor, factors_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """Add y to h in place."""
    assert x_TN.shape == h_TN.shape and factors_N.shape == h_TN.shape[1:] and h_TN.dtype == torch.float32
    is_half = bias_N is None or bias_N.dtype == torch.bfloat16
    if is_half and row_kernel.are_vectors(h_TN, x_TN, dtype=torch.float32):
        return _launch("add_scaled", x_TN, factors_N, bias_N, h_TN)
    h_TN.addcmul_(x_TN, factors_N)
    return h_TN if bias_N is None else h_TN.add_(bias_N)


def _launch(name: str, x_TN: Tensor, factors_N: Tensor, bias_N: Tensor | None, to: Tensor) -> Tensor:
    assert factors_N.dtype == torch.float32 and factors_N.is_contiguous()
    assert bias_N is None or (bias_N.shape == factors_N.shape and bias_N.dtype == torch.bfloat16)
    (T, N), each = x_TN.shape, 256 * 16 // x_TN.element_size()
    pointers = addresses(x_TN, factors_N, bias_N, to)
    operands = struct.pack("4Q4i", *pointers, T, N, x_TN.stride(0), to.stride(0))
    if T:
        kernel = row_kernel.kernel("scale_columns.cu", name, x_TN.device)
        kernel.launch(grid=-(-N // each) * -(-T // _ROWS), block_threads=256, parameters=(operands,))
    return to
