"""Log-probabilities of given tokens and entropies of their distributions, one chunk of logits at a time.

    l_CV = hidden_TD[rows_C] @ head_VD.T / temperature        p_CV = softmax(l_CV)
    with a soft cap: l_CV = cap * tanh(scale * hidden_TD[rows_C] @ head_VD.T / cap) / temperature
    logprob_C = l_C[target] - logsumexp(l_CV)         entropy_C = logsumexp(l_CV) - sum_v p_CV * l_CV
    d logprob_C / d hidden_TD[rows_C] = (onehot(target) - p_CV) @ head_VD / temperature
    where only some tokens were allowed (token_mask.py), the sum of exp in logsumexp and p are over these

    hidden_TD   any float    its rows predict           head_VD   fp32 or 16 bits: the products' operands
    rows_C      int64        the row of each target     logits, probabilities, gradients' sums: fp32
    targets_C   int64        the tokens

The gradient of a token's logprob is one number that scales d logprob / d hidden. The forward pass computes
that row while the logits exist and keeps it, fp32 [C, D]: two products with the head in all. Recomputing the
logits in the backward pass would be a third. No tensor is larger than [chunk_tokens, V].

On a GPU in bfloat16 one kernel reads a chunk's logits twice and writes onehot - p: 14 bytes per logit,
including the product's. torch's operations move about 75, which takes as long again as the products. A soft
cap is computed in it too.
"""

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl.kernels import row_kernel, untried
from qerl.kernels.matmul_fp32 import product
from qerl.kernels.nvrtc import addresses
from qerl.kernels.token_mask import TokenMask

CASES = ((1, 8, 32, 4), (7, 16, 50, 3), (24, 32, 1000, 8), (33, 64, 4099, 64))  # T, D, V, chunk_tokens
_THREADS = 1024


def reference(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    allowed_TV: Tensor | None = None,
    softcap: "Softcap | None" = None,
):
    """The definition above in float64, differentiable, all logits at once. allowed_TV: bool; None: all."""
    logits_TV = hidden_TD.double() @ head_VD.double().T
    if softcap is not None:
        logits_TV = softcap.cap * (logits_TV * (softcap.scale / softcap.cap)).tanh()
    logits_TV = logits_TV / temperature
    if allowed_TV is not None:
        logits_TV = logits_TV.masked_fill(~allowed_TV, -torch.inf)
    logprobs_TV = logits_TV.log_softmax(-1)
    logprob_T = logprobs_TV.gather(1, targets_T[:, None]).squeeze(1)
    return logprob_T, -(logprobs_TV.exp() * logprobs_TV.clamp(min=-1e9)).sum(-1)


def _chunk(
    logits_CV: Tensor, head_VD: Tensor, targets_C1: Tensor, temperature: float, has_slope: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (logprob_C, entropy_C, onehot - p in the head's dtype) of one chunk."""
    if row_kernel.are_vectors(head_VD) and logits_CV.shape[1] % 8 == 0:
        return launch(logits_CV, targets_C1, temperature, has_slope)
    logits_CV.div_(temperature).sub_(logits_CV.amax(1, keepdim=True))
    p_CV = logits_CV.exp()
    total_C1 = p_CV.sum(1, keepdim=True)
    p_CV.div_(total_C1)
    log_total_C = total_C1.squeeze(1).log()
    logprob_C = logits_CV.gather(1, targets_C1).squeeze(1) - log_total_C
    entropy_C = log_total_C - logits_CV.mul_(p_CV).sum(1)
    if not has_slope:
        return logprob_C, entropy_C, None
    # Round after the subtraction: near p = 1 the difference of rounded terms would be inexact.
    p_CV.neg_().scatter_add_(1, targets_C1, torch.ones_like(targets_C1, dtype=torch.float32))
    return logprob_C, entropy_C, p_CV.to(head_VD.dtype)


def launch(
    logits_CV: Tensor,
    targets_C1: Tensor,
    temperature: float,
    has_slope: bool,
    softcap: "Softcap | None" = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (logprob_C, entropy_C, d logprob / d logit * temperature, bfloat16) by the kernel. softcap:
    logits_CV are products, and the slope is theirs."""
    C, V = logits_CV.shape
    device = logits_CV.device
    logprob_C, entropy_C = (torch.empty(C, dtype=torch.float32, device=device) for _ in range(2))
    slope_CV = torch.empty(C, V, dtype=torch.bfloat16, device=device) if has_slope else None
    defines, targets_C1 = {"THREADS": _THREADS}, targets_C1.contiguous()
    operands = struct.pack(
        "5Qif", *addresses(logits_CV, targets_C1, logprob_C, entropy_C, slope_CV), V, 1 / temperature
    )
    if softcap is not None:
        defines["SOFTCAP"] = 1
        operands += struct.pack("2f", softcap.scale, softcap.cap)
    kernel = row_kernel.kernel("logprob.cu", "logprob", device, **defines)
    kernel.launch(grid=C, block_threads=_THREADS, parameters=(operands,))
    return logprob_C, entropy_C, slope_CV


def cap_(logits_TV: Tensor, cap: float) -> Tensor:
    """Cap the logits in place."""
    return logits_TV.div_(cap).tanh_().mul_(cap)


class Softcap(NamedTuple):
    """Softcap(cap=30.0, scale=1.0)"""

    cap: float
    scale: float
    """Factor of the products before the cap."""

    def slope(self, capped_CV: Tensor) -> Tensor:
        """Return d capped / d product."""
        return (capped_CV / self.cap).square_().neg_().add_(1).mul_(self.scale)


def _walk(
    hidden_TD: Tensor,
    rows_C: Tensor,
    head_VD: Tensor,
    targets_C: Tensor,
    temperature: float,
    chunk_tokens: int,
    softcap: Softcap | None,
    slope_CD: Tensor | None,
    mask: TokenMask | None,
) -> tuple[Tensor, Tensor]:
    """Return (logprob_C, entropy_C), by chunks; fill slope_CD (fp32), if given, with d logprob / d hidden."""
    logprob_C = torch.empty(len(rows_C), dtype=torch.float32, device=hidden_TD.device)
    entropy_C = torch.empty_like(logprob_C)
    for start in range(0, len(rows_C), chunk_tokens):
        some = slice(start, start + chunk_tokens)
        hidden_CD = hidden_TD.index_select(0, rows_C[some]).to(head_VD.dtype)
        logits_CV, bend_CV = product(hidden_CD, head_VD.T), None
        settings = targets_C[some, None], temperature, slope_CD is not None
        if softcap is not None and mask is None and _caps_in_kernel(head_VD):
            logprob_C[some], entropy_C[some], slope_CV = launch(logits_CV, *settings, softcap)
        else:
            if softcap is not None:
                cap_(logits_CV.mul_(softcap.scale), softcap.cap)
                bend_CV = softcap.slope(logits_CV)
            if mask is not None:
                mask.fill_(logits_CV, start)
            logprob_C[some], entropy_C[some], slope_CV = _chunk(logits_CV, head_VD, *settings)
        del logits_CV
        if slope_CD is not None and slope_CV is not None:
            slope_CV = slope_CV if bend_CV is None else slope_CV.mul_(bend_CV)
            slope_CD[some] = product(slope_CV, head_VD).div_(temperature)
        del slope_CV  # otherwise it would coexist with the next chunk's logits
    return logprob_C, entropy_C


def _caps_in_kernel(head_VD: Tensor) -> bool:
    return untried.are_used() and row_kernel.are_vectors(head_VD) and head_VD.shape[0] % 8 == 0


def scatter_rows(
    slope_CD: Tensor, rows_C: Tensor, grad_C: Tensor, shape: torch.Size, chunk_tokens: int
) -> Tensor:
    """Return fp32 d_TD of this shape, with grad_c slope_c added to row rows_C[c]. Sum in fp32 and in order: a
    prompt's last row gets one gradient for each of its samples."""
    d_TD = torch.zeros(shape, dtype=torch.float32, device=slope_CD.device)
    for start in range(0, len(rows_C), chunk_tokens):
        some = slice(start, start + chunk_tokens)
        d_TD.index_put_((rows_C[some],), slope_CD[some] * grad_C[some, None], accumulate=True)
    return d_TD


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD, rows_C, head_VD, targets_C, temperature, chunk_tokens, softcap, mask):
        slope_CD = torch.empty(len(rows_C), hidden_TD.shape[1], dtype=torch.float32, device=hidden_TD.device)
        logprob_C, entropy_C = _walk(
            hidden_TD, rows_C, head_VD, targets_C, temperature, chunk_tokens, softcap, slope_CD, mask
        )
        ctx.save_for_backward(slope_CD, rows_C)
        ctx.shape, ctx.dtype, ctx.chunk_tokens = hidden_TD.shape, hidden_TD.dtype, chunk_tokens
        ctx.mark_non_differentiable(entropy_C)
        return logprob_C, entropy_C

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        slope_CD, rows_C = ctx.saved_tensors
        d_TD = scatter_rows(slope_CD, rows_C, grads[0], ctx.shape, ctx.chunk_tokens)
        return d_TD.to(ctx.dtype), *[None] * 7


def chunked_logprob(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_C: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    rows_C: Tensor | None = None,
    softcap: Softcap | None = None,
    mask: TokenMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Return fp32 (logprob_C, entropy_C). logprob is differentiable in hidden_TD; entropy has no gradient.

    rows_C: None means one target per row. mask: None means every token is allowed.
    """
    if rows_C is None:
        rows_C = torch.arange(len(hidden_TD), device=hidden_TD.device)
    assert hidden_TD.ndim == 2 and targets_C.shape == rows_C.shape and targets_C.dtype == torch.int64
    assert head_VD.ndim == 2 and head_VD.shape[1] == hidden_TD.shape[1] and head_VD.is_contiguous()
    assert temperature > 0 and chunk_tokens > 0
    if hidden_TD.requires_grad and torch.is_grad_enabled():
        return _Logprob.apply(hidden_TD, rows_C, head_VD, targets_C, temperature, chunk_tokens, softcap, mask)
    hidden_TD = hidden_TD.detach()
    return _walk(hidden_TD, rows_C, head_VD, targets_C, temperature, chunk_tokens, softcap, None, mask)
