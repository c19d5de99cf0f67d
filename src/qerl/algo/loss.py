"""The policy losses: one objective a token, and one weight for every token of a sample.

    loss = sum_i sum_t weight_i * -min(ratio_t A_i, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_i)
    ratio_t = exp(logprob_t - old_t)                                  PPO, arXiv 1707.06347, 3

    grpo      weight_i = 1 / (S |o_i|)          each sample counts the same       arXiv 2402.03300, 4.1.1
    dapo      weight_i = 1 / sum_j |o_j|        each token counts the same        arXiv 2503.14476, 3.3
    dr_grpo   weight_i = 1 / (S max_tokens)     a constant: no bias by length     arXiv 2503.20783, 3.2

|o_i| is the number of tokens of sample i, S the number of samples. The weights are those of the WHOLE update,
so however it is split into micro-batches, the sum over them is the same loss. Gradients of different
micro-batches are added, never averaged.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is still finite when squared in fp32


class Weights(Protocol):
    def __call__(self, lengths_S: list[int], *, num_samples: int, max_tokens: int) -> list[float]:
        """The weight of each token of each sample. num_samples may exceed len(lengths_S): a sample that was
        left out of the loss then still counts in a mean over samples."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """LOSSES["dapo"] is Loss(name="dapo", objective=clipped, weights=token_mean)."""

    name: str
    objective: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
    """(logprob_T, old_T, advantage_T, clip_low, clip_high) -> (loss_T, was_clipped_T)."""
    weights: Weights


def clipped(
    logprob_T: Tensor, old_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss of each token, and where the clip took the gradient away."""
    ratio_T = (logprob_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain_T = ratio_T * advantage_T
    bound_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_T
    return -torch.minimum(plain_T, bound_T), bound_T < plain_T


def sample_mean(lengths_S: list[int], *, num_samples: int, max_tokens: int) -> list[float]:
    """The mean within each sample, then over samples; a sample without tokens weighs nothing."""
    return [1.0 / (num_samples * length) if length else 0.0 for length in lengths_S]


def token_mean(lengths_S: list[int], *, num_samples: int, max_tokens: int) -> list[float]:
    """The mean over all tokens of the update."""
    num_tokens = sum(lengths_S)
    return [1.0 / num_tokens if length else 0.0 for length in lengths_S]


def constant(lengths_S: list[int], *, num_samples: int, max_tokens: int) -> list[float]:
    """The sum over tokens divided by what the update could hold at most."""
    return [1.0 / (num_samples * max_tokens)] * len(lengths_S)


LOSSES: dict[str, Loss] = {
    "grpo": Loss(name="grpo", objective=clipped, weights=sample_mean),
    "dapo": Loss(name="dapo", objective=clipped, weights=token_mean),
    "dr_grpo": Loss(name="dr_grpo", objective=clipped, weights=constant),
}
