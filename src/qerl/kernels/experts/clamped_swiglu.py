"""y = (up + 1) * gate * sigmoid(alpha * gate) of clamped gate and up, the activation of gpt-oss's experts.

    gate = min(gate, limit)        up = clamp(up, -limit, limit)

fp32 inside, rounded once. A clamped element has no gradient. Source: openai/gpt-oss, torch/model.py.
"""

import struct

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel

CASES = ((1, 8), (5, 96), (33, 264))  # T, F


def reference(gate_TF: Tensor, up_TF: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Compute the definition in float64; differentiable."""
    gate_TF = torch.minimum(gate_TF.double(), torch.tensor(limit, dtype=torch.float64))
    up_TF = up_TF.double().clamp(-limit, limit)
    return (up_TF + 1) * gate_TF / (1 + torch.exp(-alpha * gate_TF))


def clamped_swiglu(gate_TF: Tensor, up_TF: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return y_TF in the inputs' dtype; differentiable."""
    assert gate_TF.shape == up_TF.shape and gate_TF.dtype == up_TF.dtype
    gate, up = gate_TF.float().clamp(max=limit), up_TF.float().clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_TF.dtype)


def clamped_swiglu_pairs(gate_up_T2F: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return the same of gate and up whose columns alternate: gate 0, up 0, gate 1, ..."""
    is_aligned = gate_up_T2F.shape[1] % 16 == 0 and gate_up_T2F.is_contiguous()
    if is_aligned and row_kernel.are_vectors(gate_up_T2F):
        return _ClampedSwiGLU.apply(gate_up_T2F, struct.pack("ff", alpha, limit))
    gate_TF, up_TF = gate_up_T2F.unflatten(1, (-1, 2)).unbind(2)
    return clamped_swiglu(gate_TF, up_TF, alpha=alpha, limit=limit)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_T2F, settings):
        ctx.save_for_backward(gate_up_T2F)
        ctx.settings = settings
        y_TF = gate_up_T2F.new_empty(len(gate_up_T2F), gate_up_T2F.shape[1] // 2)
        _launch("clamped_swiglu", y_TF, gate_up_T2F, y_TF, settings)
        return y_TF

    @staticmethod
    def backward(ctx, dy_TF):  # type: ignore[override]
        (gate_up_T2F,) = ctx.saved_tensors
        dy_TF, d_T2F = dy_TF.contiguous(), torch.empty_like(gate_up_T2F)
        _launch("clamped_swiglu_backward", dy_TF, dy_TF, gate_up_T2F, d_T2F, ctx.settings)
        return d_T2F, None


def _launch(name: str, like_TF: Tensor, *parameters: Tensor | bytes) -> None:
    units = like_TF.numel() // 8
    if units:
        row_kernel.kernel("clamped_swiglu.cu", name, like_TF.device).launch(
            grid=-(-units // 256), block_threads=256, parameters=(*parameters, units)
        )
