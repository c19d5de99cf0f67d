"""Outcomes of the next token and a divergence over them, one chunk of logits at a time.

    p_CV = softmax(l_CV), l_CV as in logprob.py
    outcomes x of row c: the K tokens ids_CK, and all other tokens together; X = K + 1
    s_CX = log p of the outcomes; that of the rest is at least `min_logprob`, also where there is no rest
    divergence_C = f(s_CX, t_CX)          t_CX: those of the teacher

    g_x = d f / d s_x, G = sum_x g_x:     d f / d l_v = g_v - G p_v                  v one of the K
                                          d f / d l_v = p_v (g_rest / p_rest - G)    v one of the others

As g and p sum to G and 1, g_x - G p_x = g_x sum_{y != x} p_y - p_x sum_{y != x} g_y, which subtracts no
nearly equal terms where p_x is nearly 1. That of the rest over p_rest is the factor of the others' p_v.

The gradient of a row's divergence is one number that scales d divergence / d hidden, which the forward pass
computes while the logits exist (logprob.py). No tensor is larger than [chunk_tokens, V].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl.kernels.head.head_operand import HeadOperand, operand_rows
from qerl.kernels.head.logprob import Softcap, scatter_rows
from qerl.kernels.pointwise.matmul_fp32 import product

CASES = ((1, 8, 32, 4, 3), (7, 16, 50, 3, 1), (24, 32, 300, 8, 20), (5, 8, 12, 2, 12))  # T, D, V, chunk, K


class Head(NamedTuple):
    """A head, which turns hidden states into logits."""

    operand: HeadOperand
    temperature: float
    softcap: Softcap | None
    chunk_tokens: int

    @property
    def operand_VD(self) -> Tensor:
        """The whole operand, unpacked."""
        return operand_rows(self.operand, slice(0, self.operand.shape[0]))


class Outcomes(NamedTuple):
    """logprob_C, entropy_C of the targets; the K most likely tokens and the log-probabilities of K + 1
    outcomes, without a gradient."""

    logprob_C: Tensor
    entropy_C: Tensor
    ids_CK: Tensor
    logprobs_CX: Tensor


def reference(
    hidden_TD: Tensor,
    head_VD: Tensor,
    ids_TK: Tensor,
    t_TX: Tensor,
    divergence: Callable[[Tensor, Tensor], Tensor],
    *,
    temperature: float,
    min_logprob: float,
) -> Tensor:
    """The definition above in float64, differentiable, all logits at once."""
    logprobs_TV = (hidden_TD.double() @ head_VD.double().T / temperature).log_softmax(-1)
    others_TV = logprobs_TV.scatter(1, ids_TK, float("-inf"))
    rest_T1 = others_TV.exp().sum(-1, keepdim=True)
    rest_T1 = rest_T1.clamp(min=torch.tensor(min_logprob).double().exp().item()).log()
    return divergence(torch.cat([logprobs_TV.gather(1, ids_TK), rest_T1], -1), t_TX.double())


def _logits(hidden_CD: Tensor, head: Head) -> tuple[Tensor, Tensor | None]:
    """Return logits and, with a soft cap, d capped / d product."""
    operand_VD = head.operand_VD
    logits_CV = product(hidden_CD.to(operand_VD.dtype), operand_VD.T)
    bend_CV = None if head.softcap is None else head.softcap.bend_(logits_CV)
    return logits_CV.div_(head.temperature), bend_CV


def _normalized_(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn logits into logprobs in place; return p_CV, the targets' logprobs and the entropies."""
    logits_CV.sub_(logits_CV.logsumexp(1, keepdim=True))
    p_CV = logits_CV.exp()
    entropy_C = -(p_CV * logits_CV).sum(1)
    return p_CV, logits_CV.gather(1, targets_C[:, None]).squeeze(1), entropy_C


def _split(logprobs_CV: Tensor, p_CV: Tensor, ids_CK: Tensor, min_logprob: float) -> tuple[Tensor, Tensor]:
    """Return the outcomes' logprobs, and the probability of the rest; p of the K tokens becomes 0."""
    p_CV.scatter_(1, ids_CK, 0.0)
    rest_C1 = p_CV.sum(1, keepdim=True)
    return torch.cat([logprobs_CV.gather(1, ids_CK), rest_C1.log().clamp(min=min_logprob)], 1), rest_C1


@torch.no_grad()
def top_outcomes(
    hidden_TD: Tensor, rows_C: Tensor, targets_C: Tensor, head: Head, *, top_k: int, min_logprob: float
) -> Outcomes:
    """Return the top_k most likely tokens of each row, the rest, and the targets' logprobs, all fp32."""
    parts, head = list[Outcomes](), head._replace(operand=head.operand_VD)
    for rows, targets in zip(
        rows_C.split(head.chunk_tokens), targets_C.split(head.chunk_tokens), strict=True
    ):
        logits_CV, _ = _logits(hidden_TD.index_select(0, rows), head)
        p_CV, logprob_C, entropy_C = _normalized_(logits_CV, targets)
        ids_CK = logits_CV.topk(min(top_k, logits_CV.shape[1]), dim=1).indices
        outcomes_CX, _ = _split(logits_CV, p_CV, ids_CK, min_logprob)
        parts.append(Outcomes(logprob_C, entropy_C, ids_CK, outcomes_CX))
    return Outcomes(*(torch.cat(each) for each in zip(*parts, strict=True)))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD, rows_C, targets_C, ids_CK, t_CX, divergence, head, min_logprob):
        device, num_rows = hidden_TD.device, len(rows_C)
        slope_CD = torch.empty(num_rows, hidden_TD.shape[1], dtype=torch.float32, device=device)
        results = [torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(3)]
        for start in range(0, num_rows, head.chunk_tokens):
            some = slice(start, start + head.chunk_tokens)
            logits_CV, bend_CV = _logits(hidden_TD.index_select(0, rows_C[some]), head)
            p_CV, results[1][some], results[2][some] = _normalized_(logits_CV, targets_C[some])
            s_CX, rest_C1 = _split(logits_CV, p_CV, ids_CK[some], min_logprob)
            del logits_CV
            with torch.enable_grad():
                leaf_CX = s_CX.detach().requires_grad_()
                value_C = divergence(leaf_CX, t_CX[some])
                (g_CX,) = torch.autograd.grad(value_C.sum(), leaf_CX)
            results[0][some] = value_C.detach()
            slope_CV = _slope(p_CV, rest_C1, s_CX, g_CX, ids_CK[some], min_logprob)
            slope_CV = slope_CV if bend_CV is None else slope_CV.mul_(bend_CV)
            operand = head.operand_VD
            slope_CD[some] = product(slope_CV.to(operand.dtype), operand).div_(head.temperature)
            del p_CV, slope_CV
        ctx.save_for_backward(slope_CD, rows_C)
        ctx.shape, ctx.dtype, ctx.chunk_tokens = hidden_TD.shape, hidden_TD.dtype, head.chunk_tokens
        ctx.mark_non_differentiable(results[1], results[2])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        slope_CD, rows_C = ctx.saved_tensors
        d_TD = scatter_rows(slope_CD, rows_C, grads[0], ctx.shape, ctx.chunk_tokens)
        return d_TD.to(ctx.dtype), *[None] * 7


def _slope(
    others_CV: Tensor, rest_C1: Tensor, s_CX: Tensor, g_CX: Tensor, ids_CK: Tensor, min_logprob: float
) -> Tensor:
    """Return d divergence / d logits, in the place of others_CV: p of the others, 0 for the K tokens."""
    is_there_C1 = s_CX[:, -1:] > min_logprob
    g_CX = torch.cat([g_CX[:, :-1], torch.where(is_there_C1, g_CX[:, -1:], 0.0)], 1)
    p_CX = torch.cat([s_CX[:, :-1].exp(), rest_C1], 1)
    all_but_one_XX = 1 - torch.eye(g_CX.shape[1], device=g_CX.device)
    slope_CX = g_CX * (p_CX @ all_but_one_XX) - p_CX * (g_CX @ all_but_one_XX)
    others_CV.mul_(slope_CX[:, -1:] / rest_C1.clamp(min=torch.finfo(torch.float32).tiny))
    return others_CV.scatter_(1, ids_CK, slope_CX[:, :-1])


def chunked_divergence(
    hidden_TD: Tensor,
    rows_C: Tensor,
    targets_C: Tensor,
    ids_CK: Tensor,
    t_CX: Tensor,
    divergence: Callable[[Tensor, Tensor], Tensor],
    head: Head,
    *,
    min_logprob: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 (divergence_C, logprob_C, entropy_C); only the first is differentiable in hidden_TD.

    rows_C int64: the row that predicts each target. ids_CK int64: the teacher's tokens, without repetition.
    t_CX: their logprobs and the rest's, X = K + 1. min_logprob: of the rest's logprob.
    """
    assert ids_CK.shape == (len(rows_C), t_CX.shape[1] - 1) and targets_C.shape == rows_C.shape
    head = head._replace(operand=head.operand_VD)  # every chunk multiplies by all of it
    return _Divergence.apply(hidden_TD, rows_C, targets_C, ids_CK, t_CX, divergence, head, min_logprob)
