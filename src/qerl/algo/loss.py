"""Policy losses: an objective per token, and a weight for the tokens of each sample.

    loss = sum_i sum_t weight_i * objective_t          ratio_t = exp(logprob_t - old_t)
                                                       s_i = the geometric mean of a sample's ratio_t
    objective_t
    clipped     -min(ratio_t A, clip(ratio_t, 1 - eps, 1 + eps_high) A)     PPO, arXiv 1707.06347, 3
    sequence    the same with s_i for ratio_t                                     GSPO, arXiv 2507.18071
    sequence_   the same with sg(s_i) ratio_t / sg(ratio_t), for advantages
    token       that differ within a sample                                       GSPO-token, the same
    likelihood  -A logprob_t                                                the negative log-likelihood
    weighted    -sg(clip(ratio_t, 1 - eps, 1 + eps_high)) A logprob_t       CISPO, arXiv 2506.13585
    gated       -4 / tau sigmoid(tau (ratio_t - 1)) A, tau by the sign of A       SAPO, arXiv 2511.20347
    soft        -sg(exp(-(ratio_t - 1)^2 / (2 w_t^2))) ratio_t A where A pushes
                ratio_t farther from 1, else -ratio_t A                           MASPO, arXiv 2602.17550
                w_t = width / exp(old_t)^alpha * (1 + beta_high A | 1 / (1 - beta_low A))

                weight_i
    grpo        1 / (S |o_i|)             clipped      each sample counts the same     arXiv 2402.03300, 4.1.1
    dapo        1 / sum_j |o_j|           clipped      each token counts the same      arXiv 2503.14476, 3.3
    dr_grpo     1 / (S max_tokens)        clipped      a constant: no bias by length   arXiv 2503.20783, 3.2
    bnpo        1 / (P sum_group |o_j|)   clipped      each group counts the same: TRL's bnpo where a group is
                                                       a micro-batch, as QeRL ran it
    gspo, gspo_token, sapo                as grpo      cispo, maspo, nll               as dapo

With A = 1 nll is the cross entropy of supervised fine-tuning; with other advantages it is REINFORCE.

|o_i| is the number of tokens of sample i, S the number of samples, P of groups, sg stops the gradient. The
weights are those of the WHOLE update, so the loss does not depend on its split into micro-batches. Gradients
of micro-batches are added, never averaged. eps and eps_high are algo.epsilon and algo.epsilon_high.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from qerl.algo.kl import MAX_LOG_RATIO
from qerl.algo.segment import Segments
from qerl.config import AlgoConfig

MASPO_MAX_WIDTH, MASPO_MIN_FACTOR, MASPO_MAX_FACTOR = 10.0, 0.1, 10.0  # of the authors' code


class Weights(Protocol):
    def __call__(
        self, lengths_P_G: list[list[int]], *, num_samples: int, max_tokens: int
    ) -> list[list[float]]:
        """Return the weight of each token of each sample. num_samples may exceed the number of lengths: a
        sample that is left out of the loss still counts in a mean over samples."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """LOSSES["dapo"] is Loss(objective=clipped, weights=token_mean)."""

    objective: Callable[[Tensor, Tensor, Tensor, Segments, AlgoConfig], tuple[Tensor, Tensor]]
    """(logprob_T, old_T, advantage_T, spans, algo) -> (loss_T, held_T). held_T is the share of the gradient
    of -ratio A that is held back: 1 where it is clipped, 0 where it is not."""
    weights: Weights


def clipped(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, spans: Segments, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    return _clipped(_log_ratio(logprob_T, old_T).exp(), advantage_T, algo)


def sequence_clipped(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, spans: Segments, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    mean_S = spans.mean(_log_ratio(logprob_T, old_T))
    return _clipped(spans.per_token(mean_S).exp(), advantage_T, algo)


def sequence_token_clipped(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, spans: Segments, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    mean_T = spans.per_token(spans.mean(_log_ratio(logprob_T, old_T))).detach()
    return _clipped((mean_T + logprob_T - logprob_T.detach()).exp(), advantage_T, algo)


def weighted(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, spans: Segments, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    ratio_T = _log_ratio(logprob_T, old_T).exp().detach()
    weight_T = ratio_T.clamp(1.0 - algo.epsilon, 1.0 + algo.epsilon_high)
    return -weight_T * advantage_T * logprob_T, (1.0 - weight_T / ratio_T).clamp(min=0.0)


def likelihood(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, spans: Segments, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    return -advantage_T * logprob_T, torch.zeros_like(logprob_T)


def gated(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, spans: Segments, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    positive, negative = algo.sapo.temperature_positive, algo.sapo.temperature_negative
    tau_T = torch.where(advantage_T > 0, torch.full_like(advantage_T, positive), negative)
    gate_T = (tau_T * (_log_ratio(logprob_T, old_T).exp() - 1.0)).sigmoid()
    held_T = 1.0 - 4.0 * (gate_T * (1.0 - gate_T)).detach()
    return -4.0 / tau_T * gate_T * advantage_T, held_T


def soft(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, spans: Segments, algo: AlgoConfig
) -> tuple[Tensor, Tensor]:
    maspo, ratio_T = algo.maspo, _log_ratio(logprob_T, old_T).exp()
    mass_T = maspo.width * (-maspo.alpha * old_T).exp()
    factor_T = torch.where(
        advantage_T > 0, 1.0 + maspo.beta_high * advantage_T, 1.0 / (1.0 - maspo.beta_low * advantage_T)
    )
    width_T = mass_T.clamp(maspo.width, MASPO_MAX_WIDTH) * factor_T.clamp(MASPO_MIN_FACTOR, MASPO_MAX_FACTOR)
    distance_T = (ratio_T.detach() - 1.0) / width_T
    leaves_T = distance_T * advantage_T > 0
    weight_T = torch.where(leaves_T, (-0.5 * distance_T.square()).exp(), 1.0)
    return -weight_T * ratio_T * advantage_T, 1.0 - weight_T


def _log_ratio(logprob_T: Tensor, old_T: Tensor) -> Tensor:
    return (logprob_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(ratio_T: Tensor, advantage_T: Tensor, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    plain_T = ratio_T * advantage_T
    bound_T = ratio_T.clamp(1.0 - algo.epsilon, 1.0 + algo.epsilon_high) * advantage_T
    return -torch.minimum(plain_T, bound_T), (bound_T < plain_T).to(plain_T.dtype)


def sample_mean(lengths_P_G: list[list[int]], *, num_samples: int, max_tokens: int) -> list[list[float]]:
    """Average within each sample, then over samples; a sample without tokens has weight 0."""
    return [
        [1.0 / (num_samples * length) if length else 0.0 for length in lengths_G] for lengths_G in lengths_P_G
    ]


def token_mean(lengths_P_G: list[list[int]], *, num_samples: int, max_tokens: int) -> list[list[float]]:
    """Average over all tokens of the update."""
    num_tokens = sum(map(sum, lengths_P_G))
    return [[1.0 / num_tokens if length else 0.0 for length in lengths_G] for lengths_G in lengths_P_G]


def group_mean(lengths_P_G: list[list[int]], *, num_samples: int, max_tokens: int) -> list[list[float]]:
    """Average over the tokens of each group, then over groups."""
    num_groups = len(lengths_P_G)
    return [
        [1.0 / (num_groups * sum(lengths_G)) if length else 0.0 for length in lengths_G]
        for lengths_G in lengths_P_G
    ]


def constant(lengths_P_G: list[list[int]], *, num_samples: int, max_tokens: int) -> list[list[float]]:
    """Sum over tokens, divided by the largest possible number of tokens of the update."""
    return [[1.0 / (num_samples * max_tokens)] * len(lengths_G) for lengths_G in lengths_P_G]


LOSSES: dict[str, Loss] = {
    "grpo": Loss(objective=clipped, weights=sample_mean),
    "dapo": Loss(objective=clipped, weights=token_mean),
    "dr_grpo": Loss(objective=clipped, weights=constant),
    "bnpo": Loss(objective=clipped, weights=group_mean),
    "gspo": Loss(objective=sequence_clipped, weights=sample_mean),
    "gspo_token": Loss(objective=sequence_token_clipped, weights=sample_mean),
    "cispo": Loss(objective=weighted, weights=token_mean),
    "sapo": Loss(objective=gated, weights=sample_mean),
    "maspo": Loss(objective=soft, weights=token_mean),
    "nll": Loss(objective=likelihood, weights=token_mean),
}
