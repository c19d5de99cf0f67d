"""How well a model does on prompts it does not learn from.

    accuracy = mean over prompts of the fraction of samples whose reward reaches the threshold

A sample whose reward failed counts as wrong, and is counted. The samples' random numbers come from step -1,
which no training step has: evaluation disturbs no run, and two evaluations of one run draw with the same
numbers, so that their difference shows the model and not the dice.
"""

import dataclasses
from statistics import fmean
from typing import Protocol

from qerl.algo.estimate import clustered_mean, pass_at_powers
from qerl.errors import UserError
from qerl.types import Group, Prompt, RolloutEngine, Sampling

EVALUATION_STEP = -1


class Rewards(Protocol):
    def score(self, groups: list[Group], /) -> list[list[float | None]]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Evaluation(accuracy=0.62, accuracy_error=0.02, pass_at_k={1: 0.62, 2: 0.7, 4: 0.75}, mean_tokens=8.1,
    num_prompts=256, num_failed=0)"""

    accuracy: float
    accuracy_error: float | None
    """Standard error over prompts; None for a single prompt."""
    pass_at_k: dict[int, float]
    """For k = 1, 2, 4 and so on up to the samples of a prompt."""
    mean_tokens: float
    """Length of a sample."""
    num_prompts: int
    num_failed: int
    """Samples whose reward failed."""


def evaluate(
    engine: RolloutEngine,
    rewards: Rewards,
    prompts: list[Prompt],
    *,
    num_samples: int,
    sampling: Sampling,
    seed: int,
    threshold: float = 1.0,
) -> Evaluation:
    """Sample every prompt and score; greedy is a sampling with temperature 0 and one sample a prompt."""
    if not prompts:
        raise UserError("evaluate: there are no held-out prompts")
    if sampling.temperature == 0 and num_samples != 1:
        raise UserError(f"evaluate: temperature 0 always gives the same sample, num_samples is {num_samples}")
    groups = engine.generate(
        prompts, num_samples=num_samples, sampling=sampling, seed=seed, step=EVALUATION_STEP
    )
    rewards_P_G = rewards.score(groups)
    correct_P_G = [[r is not None and r >= threshold for r in rewards_G] for rewards_G in rewards_P_G]
    assert [len(correct_G) for correct_G in correct_P_G] == [num_samples] * len(prompts)
    accuracy, accuracy_error = clustered_mean(correct_P_G)
    return Evaluation(
        accuracy=accuracy,
        accuracy_error=accuracy_error,
        pass_at_k=pass_at_powers(correct_P_G),
        mean_tokens=fmean(len(sample.logprobs_T) for group in groups for sample in group.samples_G),
        num_prompts=len(prompts),
        num_failed=sum(rewards_G.count(None) for rewards_G in rewards_P_G),
    )


def greedy(sampling: Sampling) -> Sampling:
    """The same with the most likely token at each place."""
    return dataclasses.replace(sampling, temperature=0.0, top_k=None, top_p=None, min_p=None)
