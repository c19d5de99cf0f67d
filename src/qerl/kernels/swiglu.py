"""y = silu(gate) * up, and its gradients in both.

    silu(g) = g s,  s = 1 / (1 + exp(-g))        dgate = dy up s (1 + g (1 - s))        dup = dy silu(g)

On a GPU in bfloat16: fp32 inside, rounded once; dgate and dup are the halves of one tensor's rows, as the
backward pass of a joined product wants them. Elsewhere torch's own operations, silu rounded on its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels import vectors

CASES = ((1, 8), (5, 96), (33, 2056), (7, 18_944))  # T, F
_BLOCK_THREADS = 256


def reference(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """The definition in float64; differentiable."""
    return F.silu(gate_TF.double()) * up_TF.double()


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, room: int = 0) -> Tensor:
    """y_TF; on a GPU with room for so many columns behind each row."""
    assert gate_TF.shape == up_TF.shape and gate_TF.dim() == 2
    if vectors.are_vectors(gate_TF, up_TF) and gate_TF.stride() == up_TF.stride():
        return _SwiGLU.apply(gate_TF, up_TF, room)
    return F.silu(gate_TF) * up_TF


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_TF, up_TF, room):
        T, F = gate_TF.shape
        y_TF = vectors.rows(T, F, room, gate_TF)
        _launch("swiglu", gate_TF, (gate_TF, up_TF, y_TF), y_TF.stride(0))
        ctx.save_for_backward(gate_TF, up_TF)
        return y_TF

    @staticmethod
    def backward(ctx, dy_TF):  # type: ignore[override]
        gate_TF, up_TF = ctx.saved_tensors
        dy_TF = dy_TF if vectors.are_vectors(dy_TF) else dy_TF.contiguous()
        T, F = gate_TF.shape
        d_T2F = torch.empty(T, 2 * F, dtype=gate_TF.dtype, device=gate_TF.device)
        _launch("swiglu_backward", gate_TF, (dy_TF, gate_TF, up_TF, d_T2F), dy_TF.stride(0))
        return d_T2F[:, :F], d_T2F[:, F:], None


def _launch(name: str, gate_TF: Tensor, tensors: tuple[Tensor, ...], other_stride: int) -> None:
    T, F = gate_TF.shape
    blocks_a_row = -(-F // (8 * _BLOCK_THREADS))
    if T:
        vectors.kernel("swiglu.cu", name, gate_TF.device).launch(
            grid=T * blocks_a_row,
            block_threads=_BLOCK_THREADS,
            parameters=(*tensors, F, blocks_a_row, gate_TF.stride(0), other_stride),
        )
