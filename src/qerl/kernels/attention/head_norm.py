"""Heads of queries and keys, normed and rotated, from the columns q | k | v of one product.

    q_n = rotate(norm(q_n))        k_n = rotate(norm(k_n))        v as it is

norm is RMSNorm over each head with a weight for queries and one for keys, or nothing; rotate is that of
rotary.py. On a GPU in bfloat16 one launch in place of six (copies of heads, norms, rotations), and in the
backward pass one that writes the gradients of q, k and v beside each other, so that the product's backward
pass need not copy them. The bits are those of rms_norm.py and rotary.py one after the other.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.attention import rotary
from qerl.kernels.pointwise.rms_norm import rms_norm
from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.nvrtc import addresses

CASES = ((5, 4, 2, 64), (3, 7, 1, 128), (130, 32, 4, 128))  # T, N, K, H


class HeadNorms(NamedTuple):
    """The weights [H], fp32, of the norms of queries and keys."""

    q_H: Tensor
    k_H: Tensor
    eps: float


def reference(
    x_TN: Tensor, weight_H: Tensor | None, eps: float, cosine_T1H: Tensor, sine_T1H: Tensor
) -> Tensor:
    """Compute the definition of queries or keys in float64; differentiable in x."""
    x_TNH = x_TN.double().unflatten(1, (-1, cosine_T1H.shape[-1]))
    if weight_H is not None:
        x_TNH = x_TNH / (x_TNH.square().mean(-1, keepdim=True) + eps).sqrt() * weight_H.double()
    return rotary.reference(x_TNH, cosine_T1H, sine_T1H)


def turned_heads(
    q_TN: Tensor, k_TK: Tensor, v_TK: Tensor, norms: HeadNorms | None, cosine_T1H: Tensor, sine_T1H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q_TNH, k_TKH, v_TKH; differentiable in q, k and v."""
    head_size = cosine_T1H.shape[-1]
    if _has_kernel(q_TN, k_TK, v_TK, head_size):
        weights = (None, None, 0.0) if norms is None else norms
        return _TurnedHeads.apply(q_TN, k_TK, v_TK, *weights, cosine_T1H, sine_T1H)
    q_TNH, k_TKH, v_TKH = (x.unflatten(1, (-1, head_size)) for x in (q_TN, k_TK, v_TK))
    if norms is not None:
        q_TNH = rms_norm(q_TNH, norms.q_H, None, norms.eps, dtype=q_TNH.dtype)
        k_TKH = rms_norm(k_TKH, norms.k_H, None, norms.eps, dtype=k_TKH.dtype)
    q_TNH, k_TKH = (rotary.rotate(x, cosine_T1H, sine_T1H) for x in (q_TNH, k_TKH))
    return q_TNH, k_TKH, v_TKH


def _has_kernel(q_TN: Tensor, k_TK: Tensor, v_TK: Tensor, head_size: int) -> bool:
    columns = q_TN, k_TK, v_TK
    if not (head_size in (64, 128, 256) and row_kernel.are_vectors(*columns)):
        return False
    if len({(x.untyped_storage().data_ptr(), x.stride()) for x in columns}) > 1 or not len(q_TN):
        return False
    return all(x.storage_offset() + x.shape[1] == y.storage_offset() for x, y in pairwise(columns))


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TN, k_TK, v_TK, q_H, k_H, eps, cosine_T1H, sine_T1H):
        T, H = len(q_TN), cosine_T1H.shape[-1]
        for angle in (cosine_T1H, sine_T1H):
            assert angle.shape == (T, 1, H) and angle.dtype == torch.float32 and angle.is_contiguous()
        q_TNH, k_TKH = (
            torch.empty(T, x.shape[1] // H, H, dtype=x.dtype, device=x.device) for x in (q_TN, k_TK)
        )
        inverse = None
        if q_H is not None:
            assert all(w.shape == (H,) and w.dtype == torch.float32 and w.is_contiguous() for w in (q_H, k_H))
            num_heads = q_TNH.shape[1] + k_TKH.shape[1]
            inverse = torch.empty(T, num_heads, dtype=torch.float32, device=q_TN.device)
        heads = q_TNH.shape[1], k_TKH.shape[1], v_TK.shape[1] // H
        tensors = q_TN, cosine_T1H, sine_T1H, q_H, k_H, inverse, q_TNH, k_TKH, None, None, None, None
        _launch("head_norm", tensors, heads, q_TN.stride(0), eps, sum(heads[:2]))
        # without norms nothing of x is needed again
        ctx.save_for_backward(None if q_H is None else q_TN, cosine_T1H, sine_T1H, q_H, k_H, inverse)
        ctx.heads, ctx.x_stride, ctx.eps = heads, q_TN.stride(0), eps
        return q_TNH, k_TKH, v_TK.data.unflatten(1, (-1, H))

    @staticmethod
    def backward(ctx, *d):
        saved = ctx.saved_tensors
        T, _, H = saved[1].shape  # cosines
        dq, dk, dv = (each.contiguous() for each in d)
        dx = torch.empty(T, sum(ctx.heads) * H, dtype=dq.dtype, device=dq.device)
        tensors = *saved, None, None, dq, dk, dv, dx
        _launch("head_norm_backward", tensors, ctx.heads, ctx.x_stride, ctx.eps, sum(ctx.heads))
        return *dx.split([n * H for n in ctx.heads], 1), None, None, None, None, None


def _launch(
    name: str, tensors: Sequence[Tensor | None], heads: tuple[int, ...], x_stride: int, eps: float, used: int
) -> None:
    """used: heads of a row that the kernel passes over."""
    cosine_T1H, has_norm = tensors[1], int(tensors[3] is not None)
    assert cosine_T1H is not None
    T, _, H = cosine_T1H.shape
    threads = min((96, 128, 160, 192), key=lambda n: -(-used // (n // (H // 16))) * n)
    defines = {"HEAD": H, "THREADS": threads, "NORM": has_norm}
    operands = struct.pack("12Q4if4x", *addresses(*tensors), *heads, x_stride, eps)
    kernel = row_kernel.kernel("head_norm.cu", name, cosine_T1H.device, **defines)
    kernel.launch(grid=T, block_threads=threads, parameters=(operands,))
