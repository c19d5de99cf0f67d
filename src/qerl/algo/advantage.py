"""Advantages: how much better each sample did than the others of its group.

    group_normalised   A_i = (r_i - mean) / (std + 1e-4)           GRPO, arXiv 2402.03300, 4.1.2
    batch_normalised   A_i = (r_i - mean) / (std of all groups' r + 1e-4)    PPO Lite, arXiv 2508.08221
    mean_only          A_i = r_i - mean                            Dr. GRPO, arXiv 2503.20783, 3.2
    leave_one_out      A_i = r_i - mean of the others              RLOO, arXiv 2402.14740, 3.2
    beta               A_i = (r_i - p) / f(p; 1 + a/3, 1 + b/3)    BNPO, arXiv 2506.02864

p is the group's mean, f the density of a Beta distribution whose a and b match the mean and the unbiased
variance of all groups' p. Rewards are in [0, 1]. If no Beta distribution has these moments, or if the
variance is only rounding (weighted rewards of 0.3 and 0.30000000000000004), the density is 1, which leaves r
- mean.

The std is unbiased (divided by n - 1): the paper does not say which, and most implementations use this one.
A reward of None has failed: it enters no statistic, and its advantage is 0.
"""

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean, stdev, variance

from qerl.errors import require

STD_EPSILON = 1e-4
_ROUNDING = 1e-12
"""Rounding error that is tolerated in a reward or a mean outside [0, 1], and in a variance of means."""
Advantages = Callable[[list[list[float | None]]], list[list[float]]]
"""rewards_P_G of all groups -> advantages_P_G."""


def is_informative(rewards_G: list[float | None]) -> bool:
    """True if the rewards differ: equal rewards give zero advantages and no gradient."""
    known = _known(rewards_G)
    return len(known) > 1 and min(known) < max(known)


def group_normalised(rewards_G: list[float | None]) -> list[float]:
    """Return the rewards in standard deviations from their group's mean."""
    if not is_informative(rewards_G):
        return [0.0] * len(rewards_G)
    scale = stdev(_known(rewards_G)) + STD_EPSILON
    return [advantage / scale for advantage in mean_only(rewards_G)]


def batch_normalised(rewards_P_G: list[list[float | None]]) -> list[list[float]]:
    """Return the rewards minus their group's mean, in standard deviations of the rewards of all groups."""
    known = [reward for rewards_G in rewards_P_G for reward in _known(rewards_G)]
    scale = (stdev(known) if len(known) > 1 else 0.0) + STD_EPSILON
    return [[advantage / scale for advantage in mean_only(rewards_G)] for rewards_G in rewards_P_G]


def mean_only(rewards_G: list[float | None]) -> list[float]:
    """Return the rewards minus their group's mean; easy and hard prompts keep their own scale."""
    if not is_informative(rewards_G):
        return [0.0] * len(rewards_G)
    mean = fmean(_known(rewards_G))
    return [0.0 if reward is None else reward - mean for reward in rewards_G]


def leave_one_out(rewards_G: list[float | None]) -> list[float]:
    """Return each reward minus the mean of the other rewards, a baseline that does not depend on the
    sample."""
    if not is_informative(rewards_G):
        return [0.0] * len(rewards_G)
    num_known = len(_known(rewards_G))
    return [advantage * num_known / (num_known - 1) for advantage in mean_only(rewards_G)]


def beta_normalised(rewards_P_G: list[list[float | None]]) -> list[list[float]]:
    """Return the rewards minus their group's mean, divided by the density of such means among the groups."""
    known_P_G = [known for rewards_G in rewards_P_G if (known := _known(rewards_G))]
    for reward in (reward for known in known_P_G for reward in known):
        is_share = -_ROUNDING <= reward <= 1 + _ROUNDING
        require(is_share, f"algo.advantage beta needs rewards from 0 to 1, got {reward}")
    means_P = [fmean(known) for known in known_P_G]
    shape = beta_of_moments(means_P)
    if shape is None:
        return [mean_only(rewards_G) for rewards_G in rewards_P_G]
    density = partial(beta_density, a=1.0 + shape[0] / 3.0, b=1.0 + shape[1] / 3.0)
    return [
        [advantage / density(_inside(fmean(_known(rewards_G)))) for advantage in mean_only(rewards_G)]
        if is_informative(rewards_G)
        else [0.0] * len(rewards_G)
        for rewards_G in rewards_P_G
    ]


def beta_of_moments(values: list[float]) -> tuple[float, float] | None:
    """Return (a, b) of the Beta distribution with the values' mean and unbiased variance, or None."""
    if len(values) < 2:
        return None
    mean, spread = fmean(values), variance(values)
    if not _ROUNDING < spread < mean * (1.0 - mean):
        return None
    size = mean * (1.0 - mean) / spread - 1.0
    return mean * size, (1.0 - mean) * size


def _inside(mean: float) -> float:
    return min(max(mean, _ROUNDING), 1.0 - _ROUNDING)


def beta_density(x: float, a: float, b: float) -> float:
    """Return x^(a - 1) (1 - x)^(b - 1) / B(a, b), for 0 < x < 1."""
    log_norm = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp((a - 1.0) * math.log(x) + (b - 1.0) * math.log1p(-x) - log_norm)


def _known(rewards_G: list[float | None]) -> list[float]:
    known = [reward for reward in rewards_G if reward is not None]
    assert all(math.isfinite(reward) for reward in known), rewards_G
    return known


def _alone(advantages: Callable[[list[float | None]], list[float]]) -> Advantages:
    """Apply a function of one group to each group."""
    return lambda rewards_P_G: [advantages(rewards_G) for rewards_G in rewards_P_G]


ADVANTAGES: dict[str, Advantages] = {
    "group": _alone(group_normalised),
    "batch": batch_normalised,
    "mean": _alone(mean_only),
    "leave_one_out": _alone(leave_one_out),
    "beta": beta_normalised,
}
