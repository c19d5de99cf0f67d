"""y = silu(gate) * up, and its gradients in both.

    silu(g) = g s,  s = 1 / (1 + exp(-g))        dgate = dy up s (1 + g (1 - s))        dup = dy silu(g)

On a GPU in bfloat16: fp32 inside, rounded once; dgate and dup are the two halves of the rows of one tensor,
as the backward pass of a fused product needs them. Elsewhere torch's own operations, with silu rounded too.

`put_swiglu` and `wide_gradient` are the two passes of a product whose gate and up are still in fp32
(fused_linear.py). The backward pass needs gate, rounded, but not up: the next product keeps y, and

    up s = y / g, so dgate = dy y / g (1 + g (1 - s))        |g| >= 2 ** -60: what is less counts as that

With a gate of 0, up would be lost; 2 ** -60 keeps it exactly in y, where it is too small to change any sum.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.runtime import row_kernel

CASES = ((1, 8), (5, 96), (33, 2056), (7, 18_944))  # T, F
_BLOCK_THREADS = 256
_MIN_GATE = 2.0**-60

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Function of the gate; gelu_tanh approximates gelu by tanh."""


def reference(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Compute the definition in float64; differentiable."""
    return F.silu(gate_TF.double()) * up_TF.double()


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, room: int = 0) -> Tensor:
    """Return y_TF; on a GPU with `room` free columns behind each row."""
    assert gate_TF.shape == up_TF.shape and gate_TF.dim() == 2
    if row_kernel.are_vectors(gate_TF, up_TF) and gate_TF.stride() == up_TF.stride():
        return _SwiGLU.apply(gate_TF, up_TF, room)
    return F.silu(gate_TF) * up_TF


def swiglu_halves(gate_up_T2F: Tensor) -> Tensor:
    """Return silu(gate) * up of the two halves of the columns; its gradient is one tensor too."""
    if row_kernel.are_vectors(gate_up_T2F) and gate_up_T2F.shape[1] % 16 == 0:
        return _Halves.apply(gate_up_T2F)
    return swiglu(*gate_up_T2F.chunk(2, 1))


def gated(gate_TF: Tensor, up_TF: Tensor, activation: Activation, *, room: int = 0) -> Tensor:
    """Return y = activation(gate) * up, by PyTorch's operations unless it is silu; room as in `swiglu`."""
    if activation == "silu":
        return swiglu(gate_TF, up_TF, room=room)
    return F.gelu(gate_TF, approximate="tanh" if activation == "gelu_tanh" else "none") * up_TF


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_TF, up_TF, room):
        ctx.save_for_backward(gate_TF, up_TF)
        return _value(gate_TF, up_TF, room)

    @staticmethod
    def backward(ctx, dy_TF):  # type: ignore[override]
        d_T2F = _gradient("swiglu_backward", dy_TF, *ctx.saved_tensors)
        return *d_T2F.chunk(2, 1), None


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_T2F):
        ctx.save_for_backward(gate_up_T2F)
        return _value(*gate_up_T2F.chunk(2, 1))

    @staticmethod
    def backward(ctx, dy_TF):  # type: ignore[override]
        return _gradient("swiglu_backward", dy_TF, *ctx.saved_tensors[0].chunk(2, 1))


def _value(gate_TF: Tensor, up_TF: Tensor, room: int = 0) -> Tensor:
    y_TF = row_kernel.rows(len(gate_TF), gate_TF.shape[1], room, gate_TF)
    _launch("swiglu", gate_TF, (gate_TF, up_TF, y_TF), (gate_TF.stride(0), y_TF.stride(0)))
    return y_TF


def put_swiglu(
    gate_up_T2F: Tensor, y_TF: Tensor, saved_TF: Tensor | None, factors_2F: Tensor | None = None
) -> None:
    """Fill y from fp32 and, if given, kept with gate as `wide_gradient` takes it. factors_2F, fp32, multiply
    the columns of gate and up first."""
    assert gate_up_T2F.shape == (len(y_TF), 2 * y_TF.shape[1]) and gate_up_T2F.dtype == torch.float32
    assert gate_up_T2F.is_contiguous() and (saved_TF is None or saved_TF.is_contiguous())
    if factors_2F is not None and not row_kernel.are_vectors(y_TF):
        gate_up_T2F, factors_2F = gate_up_T2F * factors_2F, None
    if row_kernel.are_vectors(y_TF):
        assert factors_2F is None or (factors_2F.dtype == torch.float32 and factors_2F.is_contiguous())
        _launch("swiglu_wide", y_TF, (gate_up_T2F, y_TF, saved_TF, factors_2F), (y_TF.stride(0),))
        return
    gate_TF, up_TF = gate_up_T2F.chunk(2, 1)
    gate_TF = gate_TF.masked_fill(gate_TF.abs() < _MIN_GATE, _MIN_GATE)  # NaN stays
    y_TF.copy_(F.silu(gate_TF).mul_(up_TF))
    if saved_TF is not None:
        saved_TF.copy_(gate_TF)


def wide_gradient(dy_TF: Tensor, gate_TF: Tensor, y_TF: Tensor) -> Tensor:
    """Return [dgate, dup] in one tensor, from what `put_swiglu` filled."""
    assert gate_TF.is_contiguous() and y_TF.shape == gate_TF.shape
    if row_kernel.are_vectors(gate_TF, y_TF):
        return _gradient("swiglu_wide_backward", dy_TF, gate_TF, y_TF)
    width = gate_TF.shape[1]
    d_T2F = gate_TF.new_empty(len(gate_TF), 2 * width)
    dy_TF, gate_TF, y_TF = dy_TF.float(), gate_TF.float(), y_TF.float()
    sigmoid_TF = gate_TF.sigmoid()
    d_T2F[:, :width] = dy_TF * (y_TF / gate_TF) * (1 + gate_TF * (1 - sigmoid_TF))
    d_T2F[:, width:] = dy_TF * gate_TF * sigmoid_TF
    return d_T2F


def _gradient(kernel: str, dy_TF: Tensor, gate_TF: Tensor, other_TF: Tensor) -> Tensor:
    """Return [dgate, dup] in one tensor; other: up, or y for the wide kernel."""
    dy_TF = dy_TF if row_kernel.are_vectors(dy_TF) else dy_TF.contiguous()
    d_T2F = gate_TF.new_empty(len(gate_TF), 2 * gate_TF.shape[1])
    strides = other_TF.stride(0), dy_TF.stride(0)
    _launch(kernel, dy_TF, (dy_TF, gate_TF, other_TF, d_T2F), strides)
    return d_T2F


def _launch(name: str, like_TF: Tensor, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...]) -> None:
    T, F = like_TF.shape
    blocks_a_row = -(-F // (8 * _BLOCK_THREADS))
    if T:
        row_kernel.kernel("swiglu.cu", name, like_TF.device).launch(
            grid=T * blocks_a_row,
            block_threads=_BLOCK_THREADS,
            parameters=(*tensors, F, blocks_a_row, *strides),
        )
