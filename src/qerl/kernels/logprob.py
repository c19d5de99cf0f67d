"""Log-probabilities of given tokens and entropies of their distributions, a chunk of logits at a time.

    l_TV = hidden_TD @ head_VD.T / temperature        p_TV = softmax(l_TV)
    logprob_T = l_T[target] - logsumexp(l_TV)         entropy_T = logsumexp(l_TV) - sum_v p_TV * l_TV
    d logprob_T / d hidden_TD = (onehot(target) - p_TV) @ head_VD / temperature

    hidden_TD   any float    the rows that predict      head_VD   fp32 or 16 bits: the products' operands
    targets_T   int64        what they are asked for    logits, probabilities, gradient rows: fp32

What arrives in the backward pass at a token's logprob is one number, so the row that it scales is made in
the forward pass, while the logits are there, and [T, D] is kept: two products with the head. Computing the
logits again in the backward pass would be a third. No tensor is larger than [chunk_tokens, V].
"""

from typing import Any

import torch
from torch import Tensor

from qerl.kernels.product import product

CASES = ((1, 8, 32, 4), (7, 16, 50, 3), (24, 32, 1000, 8), (33, 64, 4099, 64))  # T, D, V, chunk_tokens


def reference(hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, *, temperature: float):
    """The definition above in float64, differentiable, all logits at once."""
    logprobs_TV = (hidden_TD.double() @ head_VD.double().T / temperature).log_softmax(-1)
    logprob_T = logprobs_TV.gather(1, targets_T[:, None]).squeeze(1)
    return logprob_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def _chunk(
    hidden_TD: Tensor, head_VD: Tensor, targets_T1: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob_T, entropy_T, p_TV) of one chunk."""
    logits_TV = product(hidden_TD, head_VD.T).div_(temperature)
    logits_TV.sub_(logits_TV.amax(1, keepdim=True))
    p_TV = logits_TV.exp()
    total_T1 = p_TV.sum(1, keepdim=True)
    p_TV.div_(total_T1)
    log_total_T = total_T1.squeeze(1).log()
    logprob_T = logits_TV.gather(1, targets_T1).squeeze(1) - log_total_T
    return logprob_T, log_total_T - logits_TV.mul_(p_TV).sum(1), p_TV


def _walk(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    temperature: float,
    chunk_tokens: int,
    slope_TD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk; fills slope_TD, fp32, with d logprob / d hidden if it is given."""
    logprob_T = torch.empty(len(hidden_TD), dtype=torch.float32, device=hidden_TD.device)
    entropy_T = torch.empty_like(logprob_T)
    for start in range(0, len(hidden_TD), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        targets_T1 = targets_T[rows, None]
        chunk_TD = hidden_TD[rows].to(head_VD.dtype)
        logprob_T[rows], entropy_T[rows], p_TV = _chunk(chunk_TD, head_VD, targets_T1, temperature)
        if slope_TD is not None:
            # onehot - p before it is rounded: near p = 1 it would be the difference of rounded terms.
            p_TV.neg_().scatter_add_(1, targets_T1, torch.ones_like(targets_T1, dtype=torch.float32))
            slope_TD[rows] = product(p_TV.to(head_VD.dtype), head_VD).div_(temperature)
        del p_TV  # or the next chunk's logits would be a third buffer
    return logprob_T, entropy_T


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD, head_VD, targets_T, temperature, chunk_tokens):
        slope_TD = torch.empty(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
        logprob_T, entropy_T = _walk(hidden_TD, head_VD, targets_T, temperature, chunk_tokens, slope_TD)
        ctx.save_for_backward(slope_TD)
        ctx.dtype = hidden_TD.dtype
        ctx.mark_non_differentiable(entropy_T)
        return logprob_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (slope_TD,) = ctx.saved_tensors
        return (slope_TD * grads[0][:, None]).to(ctx.dtype), None, None, None, None


def chunked_logprob(
    hidden_TD: Tensor, head_VD: Tensor, targets_T: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """fp32 (logprob_T, entropy_T). logprob is differentiable in hidden_TD alone; entropy has no gradient."""
    assert hidden_TD.ndim == 2 and targets_T.shape == hidden_TD.shape[:1] and targets_T.dtype == torch.int64
    assert head_VD.ndim == 2 and head_VD.shape[1] == hidden_TD.shape[1] and head_VD.is_contiguous()
    assert temperature > 0 and chunk_tokens > 0
    if hidden_TD.requires_grad and torch.is_grad_enabled():
        return _Logprob.apply(hidden_TD, head_VD, targets_T, temperature, chunk_tokens)
    return _walk(hidden_TD.detach(), head_VD, targets_T, temperature, chunk_tokens, None)
