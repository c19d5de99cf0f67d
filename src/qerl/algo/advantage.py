"""Turning the rewards of one prompt's samples into advantages: how much better each did than its siblings.

    group_normalised   A_i = (r_i - mean) / (std + 1e-4)           GRPO, arXiv 2402.03300, 4.1.2
    mean_only          A_i = r_i - mean                            Dr. GRPO, arXiv 2503.20783, 3.2
    leave_one_out      A_i = r_i - mean of the others              RLOO, arXiv 2402.14740, 3.2

The std is the unbiased one (divided by n - 1): the paper does not say which, and this is what most
implementations compute. A reward that is None failed: it enters no statistic, and its advantage is 0.
"""

import math
from collections.abc import Callable
from statistics import fmean, stdev

STD_EPSILON = 1e-4


def is_informative(rewards_G: list[float | None]) -> bool:
    """Whether the group teaches anything: equal rewards give zero advantages and no gradient."""
    known = _known(rewards_G)
    return len(known) > 1 and min(known) < max(known)


def group_normalised(rewards_G: list[float | None]) -> list[float]:
    """The reward in standard deviations from its group's mean."""
    if not is_informative(rewards_G):
        return [0.0] * len(rewards_G)
    scale = stdev(_known(rewards_G)) + STD_EPSILON
    return [advantage / scale for advantage in mean_only(rewards_G)]


def mean_only(rewards_G: list[float | None]) -> list[float]:
    """The reward minus its group's mean; easy and hard prompts keep their own scale."""
    if not is_informative(rewards_G):
        return [0.0] * len(rewards_G)
    mean = fmean(_known(rewards_G))
    return [0.0 if reward is None else reward - mean for reward in rewards_G]


def leave_one_out(rewards_G: list[float | None]) -> list[float]:
    """The reward minus the mean of its siblings, a baseline that does not depend on the sample itself."""
    if not is_informative(rewards_G):
        return [0.0] * len(rewards_G)
    num_known = len(_known(rewards_G))
    return [advantage * num_known / (num_known - 1) for advantage in mean_only(rewards_G)]


def _known(rewards_G: list[float | None]) -> list[float]:
    known = [reward for reward in rewards_G if reward is not None]
    assert all(math.isfinite(reward) for reward in known), rewards_G
    return known


ADVANTAGES: dict[str, Callable[[list[float | None]], list[float]]] = {
    "group": group_normalised,
    "mean": mean_only,
    "leave_one_out": leave_one_out,
}
