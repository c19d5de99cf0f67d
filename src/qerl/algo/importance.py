"""What PPO's ratio is taken against, and the weight that corrects for who really drew the sample.

    loss_t = weight_t * clipped loss of exp(logprob_t - denominator_t)

                  denominator     weight
    truncated     learner_old     min(exp(learner_old - sampler), cap)     truncated importance sampling
    ratio         sampler         1
    none          learner_old     1                                        the mismatch is ignored

learner_old are the learner's logprobs before the update, sampler those of the policy that drew the tokens
(quantized kernels, noise and all). Truncated: Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training", 2025. The weight scales the policy loss only, not the KL term, and has no gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def truncated(learner_old_T: Tensor, sampler_T: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """PPO against the learner, each token weighted by how much likelier the learner finds it, up to cap."""
    learner_old_T, sampler_T = learner_old_T.detach(), sampler_T.detach()
    weight_T = (learner_old_T - sampler_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
    return learner_old_T, weight_T


def ratio(learner_old_T: Tensor, sampler_T: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """PPO against the sampler itself: its clip bounds the mismatch and the update together."""
    return sampler_T.detach(), torch.ones_like(sampler_T)


def none(learner_old_T: Tensor, sampler_T: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """PPO against the learner as if it had drawn the samples."""
    return learner_old_T.detach(), torch.ones_like(learner_old_T)


IMPORTANCE: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "truncated": truncated,
    "ratio": ratio,
    "none": none,
}
