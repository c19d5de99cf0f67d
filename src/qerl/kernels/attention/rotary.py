"""Rotary embedding: rotate each pair (j, j + H/2) of a head by its row's angle.

    y_j = x_j cos_j - x_{j+H/2} sin_j        y_{j+H/2} = x_{j+H/2} cos_j + x_j sin_j

cosine_T1H, sine_T1H   fp32; every angle twice, the sine negative in the first half (models/rope.py)

fp32 inside, y in x's dtype, rounded once. The gradient is the inverse rotation: the sine's sign changes.
"""

import struct

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel

CASES = ((1, 1, 16), (5, 3, 64), (37, 28, 128), (9, 5, 96))  # T, N, H
_THREADS = 128


def reference(x_TNH: Tensor, cosine_T1H: Tensor, sine_T1H: Tensor) -> Tensor:
    """The definition in float64; differentiable."""
    low, high = x_TNH.double().chunk(2, -1)
    cosine, sine = (t.double().chunk(2, -1)[1] for t in (cosine_T1H, sine_T1H))
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


def rotate(x_TNH: Tensor, cosine_T1H: Tensor, sine_T1H: Tensor) -> Tensor:
    """Return y_TNH, contiguous; differentiable in x."""
    return _Rotate.apply(x_TNH, cosine_T1H, sine_T1H)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TNH, cosine_T1H, sine_T1H):
        ctx.save_for_backward(cosine_T1H, sine_T1H)
        return _rotated(x_TNH, cosine_T1H, sine_T1H, 1.0)

    @staticmethod
    def backward(ctx, dy_TNH):  # type: ignore[override]
        cosine_T1H, sine_T1H = ctx.saved_tensors
        return _rotated(dy_TNH, cosine_T1H, sine_T1H, -1.0), None, None


def _rotated(x_TNH: Tensor, cosine_T1H: Tensor, sine_T1H: Tensor, direction: float) -> Tensor:
    T, N, H = x_TNH.shape
    if not (row_kernel.are_vectors(x_TNH) and x_TNH.stride(1) == H and H % 16 == 0 and H <= 16 * _THREADS):
        swapped = x_TNH.roll(H // 2, -1)
        return (x_TNH * cosine_T1H).addcmul_(swapped, sine_T1H, value=direction).to(x_TNH.dtype)
    y_TNH = torch.empty(T, N, H, dtype=x_TNH.dtype, device=x_TNH.device)
    for angle in (cosine_T1H, sine_T1H):
        assert angle.shape == (T, 1, H) and angle.dtype == torch.float32 and angle.is_contiguous()
    if T:
        kernel = row_kernel.kernel("rotary.cu", "rotate", x_TNH.device, HEAD=H, THREADS=_THREADS)
        parameters = x_TNH, cosine_T1H, sine_T1H, y_TNH, N, x_TNH.stride(0), struct.pack("f", direction)
        kernel.launch(grid=T, block_threads=_THREADS, parameters=parameters)
    return y_TNH
