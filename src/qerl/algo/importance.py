"""Off-policy correction: the denominator of PPO's ratio, and weights for samples of another policy.

    loss_t = weight_t * policy loss of exp(logprob_t - old_t)
    rho_t  = exp(learner_old_t - sampler_t)            rho_i = the product of a sample's rho_t

                          old            weight_t
    truncated             learner_old    min(rho_t, cap)                     TIS by token
    truncated_sequence    learner_old    min(rho_i, cap)                     TIS by sequence
    masked                learner_old    rho_t where rho_t <= cap, else 0    MIS by token
    masked_sequence       learner_old    rho_i where rho_i <= cap, else 0    MIS by sequence
    icepop                learner_old    rho_t where floor <= rho_t <= cap, else 0
    ratio                 sampler        1
    none                  learner_old    1                                   the mismatch is ignored

    geometric   keeps samples with rho_i^(1 / |o_i|) between geometric_low and geometric_high
    veto        keeps samples without any rho_t below veto_ratio

learner_old are the learner's logprobs before the update, sampler those of the policy that sampled the tokens
(with quantized kernels and noise). The weights scale the policy loss but not the KL term, and have no
gradient. Tokens of weight 0 still count in the loss's denominators, so the loss does not depend on how
samples are packed. TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
2025. MIS and geometric rejection: Liu et al., "When speed kills stability", 2025. Veto: verl's rollout
correction. IcePop: Ling team, arXiv 2510.18855.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from qerl.algo.kl import MAX_LOG_RATIO
from qerl.algo.segment import Segments
from qerl.config import AlgoConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Importance:
    """IMPORTANCE["icepop"] is Importance(old=of_learner, rho=by_token, bound=windowed)."""

    old: Callable[[Tensor, Tensor], Tensor]
    """(learner_old_T, sampler_T) -> denominator of PPO's ratio."""
    rho: Callable[[Tensor, Segments], Tensor]
    """(log_ratio_T, spans) -> each token's weight before it is bounded."""
    bound: Callable[[Tensor, AlgoConfig], Tensor]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Correction:
    """The result; it carries no gradient."""

    old_T: Tensor
    weight_T: Tensor
    was_capped_T: Tensor
    """True where the weight is smaller than rho, but not 0."""
    was_masked_T: Tensor
    """True where the token's own bound made its weight 0."""
    was_rejected_S: Tensor
    """True for samples whose weights are all 0."""


def of_learner(learner_old_T: Tensor, sampler_T: Tensor) -> Tensor:
    return learner_old_T


def of_sampler(learner_old_T: Tensor, sampler_T: Tensor) -> Tensor:
    return sampler_T


def by_token(log_ratio_T: Tensor, spans: Segments) -> Tensor:
    return log_ratio_T.exp()


def by_sequence(log_ratio_T: Tensor, spans: Segments) -> Tensor:
    return spans.per_token(spans.total(log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())


def uniform(log_ratio_T: Tensor, spans: Segments) -> Tensor:
    return torch.ones_like(log_ratio_T)


def capped(rho_T: Tensor, algo: AlgoConfig) -> Tensor:
    return rho_T.clamp(max=algo.importance_cap)


def dropped(rho_T: Tensor, algo: AlgoConfig) -> Tensor:
    return rho_T * (rho_T <= algo.importance_cap)


def windowed(rho_T: Tensor, algo: AlgoConfig) -> Tensor:
    return rho_T * ((rho_T >= algo.importance_floor) & (rho_T <= algo.importance_cap))


def unbounded(rho_T: Tensor, algo: AlgoConfig) -> Tensor:
    return rho_T


def geometric(log_ratio_T: Tensor, spans: Segments, algo: AlgoConfig) -> Tensor:
    mean_S = spans.mean(log_ratio_T).exp()
    return (mean_S >= algo.geometric_low) & (mean_S <= algo.geometric_high)


def veto(log_ratio_T: Tensor, spans: Segments, algo: AlgoConfig) -> Tensor:
    return spans.minimum(log_ratio_T).exp() >= algo.veto_ratio


IMPORTANCE: dict[str, Importance] = {
    "truncated": Importance(old=of_learner, rho=by_token, bound=capped),
    "truncated_sequence": Importance(old=of_learner, rho=by_sequence, bound=capped),
    "masked": Importance(old=of_learner, rho=by_token, bound=dropped),
    "masked_sequence": Importance(old=of_learner, rho=by_sequence, bound=dropped),
    "icepop": Importance(old=of_learner, rho=by_token, bound=windowed),
    "ratio": Importance(old=of_sampler, rho=uniform, bound=unbounded),
    "none": Importance(old=of_learner, rho=uniform, bound=unbounded),
}
REJECTIONS: dict[str, Callable[[Tensor, Segments, AlgoConfig], Tensor]] = {
    "geometric": geometric,
    "veto": veto,
}
"""(log_ratio_T, spans, algo) -> True for samples that are kept."""


def correct(learner_old_T: Tensor, sampler_T: Tensor, spans: Segments, algo: AlgoConfig) -> Correction:
    learner_old_T, sampler_T = learner_old_T.detach(), sampler_T.detach()
    importance = IMPORTANCE[algo.importance]
    log_ratio_T = (learner_old_T - sampler_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho_T = importance.rho(log_ratio_T, spans)
    bounded_T = importance.bound(rho_T, algo)
    is_accepted_S = torch.ones_like(spans.lengths_S, dtype=torch.bool)
    for name in algo.reject:
        is_accepted_S = is_accepted_S & REJECTIONS[name](log_ratio_T, spans, algo)
    return Correction(
        old_T=importance.old(learner_old_T, sampler_T),
        weight_T=bounded_T * spans.per_token(is_accepted_S),
        was_capped_T=(bounded_T > 0) & (bounded_T < rho_T),
        was_masked_T=(bounded_T == 0) & (rho_T > 0),
        was_rejected_S=~is_accepted_S,
    )


def effective_fraction(total: float, total_squared: float, count: float) -> float:
    """Return (sum w)^2 / (T sum w^2): the share of the T tokens that an unweighted mean of the same precision
    needs; 1 for equal weights. Kong, 1992."""
    return total * total / (count * total_squared)
