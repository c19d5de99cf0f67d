"""Pivots of DEEP-GRPO: where to branch a failed sample, and how likely a branch is to succeed.

    Q(t) ~ P(t / T) (t / T)^gamma        t = s, 2 s, ... < T: after whole segments of s of its T tokens
    P(r) = sigmoid(slope r + base)       fitted to earlier tries (r, whether a branch succeeded);
                                         1 until there are more than 10 tries, with both outcomes

The fit minimizes -sum log(P(r) or 1 - P(r)) + slope^2 / 2 by Newton's method, from slope 0 and the log odds:
scikit-learn's LogisticRegression as the authors call it, over the newest 10,000 tries. Their segments are
sentences or 50 tokens, and their r counts segments. arXiv 2602.14169.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from qerl.config import DeepConfig

WINDOW, FEW = 10_000, 10
_MAX_STEPS, _SMALL = 100, 1e-10


class Try(NamedTuple):
    """A pivot that was branched: Try(ratio=0.75, succeeded=True)."""

    ratio: float
    """Share of the sample's tokens before the pivot."""
    succeeded: bool
    """True if at least one of its branches succeeded."""


class Success(NamedTuple):
    """Return the probability that a pivot at this ratio succeeds."""

    slope: float
    base: float

    def at(self, ratio: float) -> float:
        x = self.slope * ratio + self.base
        return 1.0 / (1.0 + math.exp(-x)) if x > 0 else math.exp(x) / (1.0 + math.exp(x))


def fitted(tries: Sequence[Try]) -> Success | None:
    """Return None if there are too few tries, or only one outcome."""
    if len(tries) <= FEW or len({each.succeeded for each in tries}) < 2:
        return None
    ratio = torch.tensor([each.ratio for each in tries], dtype=torch.float64)
    x_N2 = torch.stack((ratio, torch.ones_like(ratio)), 1)
    y_N = torch.tensor([float(each.succeeded) for each in tries], dtype=torch.float64)
    penalty = torch.tensor([1.0, 0.0], dtype=torch.float64)
    w = torch.stack((torch.zeros_like(y_N[0]), y_N.mean().logit()))
    for _ in range(_MAX_STEPS):
        p_N = (x_N2 @ w).sigmoid()
        gradient = x_N2.T @ (p_N - y_N) + penalty * w
        if gradient.abs().max() < _SMALL * len(tries):
            break
        curvature = (x_N2.T * (p_N * (1 - p_N))) @ x_N2 + penalty.diag()
        w = w - torch.linalg.solve(curvature, gradient)
    return Success(*w.tolist())


def odds(
    num_tokens: int, success: Success | None, deep: DeepConfig, places: Sequence[int] | None = None
) -> dict[int, float]:
    """Return the unnormalized odds of a pivot at each of these places, 0 < t < num_tokens; None: after each
    segment. Empty for a sample of one segment."""
    if places is None:
        places = range(deep.segment_tokens, num_tokens, deep.segment_tokens)
    return {
        t: (1.0 if success is None else success.at(t / num_tokens)) * (t / num_tokens) ** deep.gamma
        for t in places
    }


def chosen(odds: dict[int, float], uniform: float) -> int | None:
    """Return the position where the cumulative odds pass this share of their sum, or None."""
    if not odds:
        return None
    target = uniform * sum(odds.values())
    running = itertools.accumulate(odds.values())
    return next((t for t, reached in zip(odds, running, strict=True) if reached > target), max(odds))
