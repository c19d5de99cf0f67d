"""RMSNorm with noise added to its weight, and its gradients in x and in the weight.

    y = x_hat * (weight + noise)                          x_hat = x / sqrt(mean(x^2) + eps)
    dx = (dy * w - x_hat * mean(dy * w * x_hat)) / sqrt(mean(x^2) + eps)        w = weight + noise
    dweight = sum_t dy_t * x_hat_t                        whatever the noise is

The noise is None, a vector for all rows, or a table [S, D], where row t of x uses row rows_T[t]. fp32
inside; y is rounded once, to the given dtype; dx has x's dtype. The residual stream is normed from fp32 to
the compute dtype, heads from the compute dtype to itself. Weight and noise are fp32. The weight's gradient
goes to its fp32 master, where there is one (master_D), and is summed from the last chunk of rows to the
first, as `matmul_fp32.summed` does.

Decode steps on a GPU norm in lora_shrink.cu and lora_shrink_portable.cu, heads in head_norm.cu and
decode_attention_*.cuh, DeltaNet in delta_net_step.cu: a change of the formula concerns them all.
"""

import struct

import torch
from torch import Tensor

from qerl.kernels.pointwise import gradient_dtype
from qerl.kernels.pointwise.matmul_fp32 import row_chunks
from qerl.kernels.runtime import row_kernel

CASES = ((1, 64), (7, 96), (33, 896), (5, 3584), (3, 8192))  # rows, width
_CTAS = 1024  # about as many as most GPUs run at once; in a long prefill each has several rows
_SUMMED_ROWS = 2048
_MAX_WIDTH = 1 << 14  # above this a thread's share of the row does not fit its registers


def reference(
    x: Tensor, weight_D: Tensor, noise: Tensor | None, eps: float, rows_T: Tensor | None = None
) -> Tensor:
    """The definition in float64; differentiable."""
    x, w = x.double(), _noisy(weight_D.double(), noise, rows_T)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def _noisy(weight_D: Tensor, noise: Tensor | None, rows_T: Tensor | None) -> Tensor:
    """Return weight + noise, [D] or [T, D]."""
    if noise is None:
        return weight_D
    return weight_D + (noise if rows_T is None else noise[rows_T.long()])


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    noise: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype,
    room: int = 0,
    rows_T: Tensor | None = None,
    master_D: Tensor | None = None,
) -> Tensor:
    """Return y in x's shape. room: extra columns behind each row, on a GPU and if x has two dimensions.
    master_D: gets the weight's gradient."""
    x_TD = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if _has_kernel(x_TD, dtype):
        room = room if x.dim() == 2 else 0
        options = eps, room, rows_T, False, False, master_D
        return _CudaNorm.apply(x_TD, weight_D, noise, *options)[0].view(x.shape)
    return _TorchNorm.apply(x, _noisy(weight_D, noise, rows_T), eps, dtype, master_D)


def fork(
    h_TD: Tensor,
    weight_D: Tensor,
    noise: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype,
    room: int = 0,
    rows_T: Tensor | None = None,
    master_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (norm of h, an h that may be modified in place): h itself without gradients, else a copy.

    The copy's gradient is added to the norm's. On a GPU each of the two passes is one kernel.
    """
    if not torch.is_grad_enabled():
        return rms_norm(h_TD, weight_D, noise, eps, dtype=dtype, room=room, rows_T=rows_T), h_TD
    if _has_kernel(h_TD, dtype):
        rounds = h_TD.dtype == torch.float32 and gradient_dtype.has_requested_dtype(h_TD, torch.bfloat16)
        return _CudaNorm.apply(h_TD, weight_D, noise, eps, room, rows_T, True, rounds, master_D)
    return rms_norm(h_TD, weight_D, noise, eps, dtype=dtype, rows_T=rows_T, master_D=master_D), h_TD.clone()


def check_noise(noise: Tensor | None, rows_T: Tensor | None, T: int, D: int) -> None:
    """Assert that noise is None, a vector, or a table with one row index per row of x."""
    assert noise is not None or rows_T is None
    if noise is not None:
        shape = noise.shape[1:] if rows_T is not None else noise.shape
        assert shape == (D,) and noise.dtype == torch.float32 and noise.is_contiguous(), noise.shape
        assert noise.data_ptr() % 16 == 0
    if rows_T is not None:
        assert rows_T.shape == (T,) and rows_T.dtype == torch.int32 and rows_T.is_contiguous()


def _has_kernel(x_TD: Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype == torch.bfloat16
        and x_TD.dtype in (torch.float32, torch.bfloat16)
        and row_kernel.are_vectors(x_TD, dtype=x_TD.dtype)
        and x_TD.shape[1] <= _MAX_WIDTH
    )


class _TorchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_D, eps, dtype, master_D):
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, inverse)
        return (wide * inverse).mul_(weight_D).to(dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, weight_D, inverse = ctx.saved_tensors
        dmaster_D = _weight_gradient(dy, x, inverse) if ctx.needs_input_grad[-1] else None
        scaled, x_hat = dy * weight_D, x * inverse
        along = (scaled * x_hat).mean(-1, keepdim=True)
        return scaled.sub_(x_hat.mul_(along)).mul_(inverse).to(x.dtype), None, None, None, dmaster_D


def _weight_gradient(dy: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """Return sum_t dy_t * x_hat_t, fp32 [D]; inverse has one element for each row."""
    dy_TD, x_TD = (t.reshape(-1, t.shape[-1]) for t in (dy, x))
    inverse_T1 = inverse.reshape(-1, 1)
    total_D = torch.zeros(x_TD.shape[1], device=x.device)
    for chunk in reversed(row_chunks(len(x_TD))):
        # some rows at a time: their products take 29 MB at a width of 3,584
        parts = zip(*(t[chunk].split(_SUMMED_ROWS) for t in (dy_TD, x_TD, inverse_T1)), strict=True)
        sums = [(dy_CD.float() * inverse_C1).mul_(x_CD).sum(0) for dy_CD, x_CD, inverse_C1 in parts]
        total_D.add_(torch.stack(sums).sum(0))
    return total_D


class _CudaNorm(torch.autograd.Function):
    """Return (y, a copy of x if `copies`, else None). rounds: x's gradient is kept in bfloat16 too."""

    @staticmethod
    def forward(ctx, x_TD, weight_D, noise, eps, room, rows_T, copies, rounds, master_D):
        T, D = x_TD.shape
        y_TD = row_kernel.rows(T, D, room, x_TD, torch.bfloat16)
        copy_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if copies else None
        assert weight_D.dtype == torch.float32 and weight_D.shape == (D,) and weight_D.is_contiguous()
        check_noise(noise, rows_T, T, D)
        inverse_T = torch.empty(T, dtype=torch.float32, device=x_TD.device)
        tensors = x_TD, weight_D, noise, rows_T, y_TD, copy_TD, inverse_T
        numbers = T, x_TD.stride(0), y_TD.stride(0), struct.pack("f", eps)
        _launch("rms_norm", x_TD, rows_T, (*tensors, *numbers))
        ctx.save_for_backward(x_TD, weight_D, noise, rows_T, inverse_T)
        ctx.rounds = rounds
        return y_TD, copy_TD

    @staticmethod
    def backward(ctx, dy_TD, dcopy_TD):  # type: ignore[override]
        x_TD, weight_D, noise, rows_T, inverse_T = ctx.saved_tensors
        dy_TD = dy_TD if row_kernel.are_vectors(dy_TD) else dy_TD.contiguous()
        dcopy_TD = None if dcopy_TD is None else dcopy_TD.contiguous()
        dx_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        rounded_TD = torch.empty_like(dx_TD, dtype=torch.bfloat16) if ctx.rounds else None
        tensors = dy_TD, x_TD, weight_D, noise, rows_T, inverse_T, dcopy_TD, dx_TD, rounded_TD
        numbers = len(x_TD), dy_TD.stride(0), x_TD.stride(0)
        _launch("rms_norm_backward", x_TD, rows_T, (*tensors, *numbers))
        if rounded_TD is not None:
            gradient_dtype.attach_rounded(dx_TD, rounded_TD)
        dmaster_D = _weight_gradient(dy_TD, x_TD, inverse_T) if ctx.needs_input_grad[-1] else None
        return dx_TD, *[None] * 7, dmaster_D


def _launch(name: str, x_TD: Tensor, rows_T: Tensor | None, parameters: tuple) -> None:
    T, D = x_TD.shape
    if T == 0:
        return
    threads = min(-(-D // 8 // 32) * 32, 512)
    defines = {
        "WIDTH": D,
        "THREADS": threads,
        "X_BYTES": x_TD.element_size(),
        "TABLE": int(rows_T is not None),
    }
    kernel = row_kernel.kernel("rms_norm.cu", name, x_TD.device, **defines)
    kernel.launch(grid=min(T, _CTAS), block_threads=threads, parameters=parameters)
