"""Divergences between the teacher's and the student's distribution of the next token.

    t_X, s_X   log-probabilities of the same outcomes, teacher and student: some tokens, and all others
               together as one; each sums to probability 1

    forward_kl   sum_x exp(t) (t - s)                    KL(teacher || student)
    reverse_kl   sum_x exp(s) (s - t)                    KL(student || teacher)
    jsd          beta KL(teacher || m) + (1 - beta) KL(student || m)
                 m = beta teacher + (1 - beta) student   GKD, arXiv 2306.13649, equation 1

The code adds the difference of both probabilities to each term of a KL, which makes it non-negative and its
gradient zero where s = t; the sum over x does not change.

Joining outcomes can only lower a divergence (data processing), so that over the teacher's most likely tokens
and the rest is a lower bound of the one over the vocabulary, and equal to it if there is no rest.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qerl.config import DistilConfig

MIN_LOGPROB = math.log(1e-9)
"""Minimum logprob of the rest: an outcome without probability has this one on both sides."""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""(s_CX, t_CX) -> one divergence per row, differentiable in s_CX."""


def forward_kl(s_CX: Tensor, t_CX: Tensor) -> Tensor:
    return (t_CX.exp() * (t_CX - s_CX) + s_CX.exp() - t_CX.exp()).sum(-1)


def reverse_kl(s_CX: Tensor, t_CX: Tensor) -> Tensor:
    return (s_CX.exp() * (s_CX - t_CX) + t_CX.exp() - s_CX.exp()).sum(-1)


def jsd(s_CX: Tensor, t_CX: Tensor, beta: float) -> Tensor:
    mixed_CX = torch.logaddexp(t_CX + math.log(beta), s_CX + math.log1p(-beta))
    return beta * forward_kl(mixed_CX, t_CX) + (1 - beta) * reverse_kl(s_CX, mixed_CX)


def divergence_of(distil: DistilConfig) -> Divergence:
    """Return the divergence that distil.loss names."""
    if distil.loss == "jsd":
        return lambda s_CX, t_CX: jsd(s_CX, t_CX, distil.jsd_beta)
    return {"forward_kl": forward_kl, "reverse_kl": reverse_kl}[distil.loss]
