"""Statistics for a handful of seeds: means with intervals, paired tests, effect sizes, corrected p values.

    interval        mean +- t(0.975, n - 1) * s / sqrt(n)                   Student's; s with n - 1
    effect size     d_z = mean(d) / s(d) of the paired differences d        Cohen's d for pairs
    paired t        two-sided p of t = mean(d) / (s(d) / sqrt(n))           assumes normal d
    exact           share of the 2^n sign patterns of d whose |sum| is at least that of d
    Holm            p_(i) <- max over j <= i of min(1, (m - j) p_(j)), p sorted, j = 0 .. m - 1

Student's t is SciPy's. The exact test assumes only that a difference is as likely to be positive
as negative if the arms do not differ; its smallest p is 2^(1 - n): 0.0625 for 5 differences, 0.002 for 10.
It counts patterns from the sums of two halves: 0.6 ms for n = 20, where `scipy.stats.permutation_test`
takes 21 s, and 0.7 s for n = 40, where that cannot finish. Both agree: tests/studies/test_statistics.py.
"""

import dataclasses
import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy import special  # scipy.stats takes 1.5 CPU s to import

MAX_EXACT_PAIRS = 40


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimate(n=5, mean=0.8, low=0.7, high=0.9); a single value has no interval."""

    n: int
    mean: float
    low: float | None
    high: float | None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the values, of which the interval was made."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 * math.sqrt(self.n) / _quantile(self.n - 1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Statistics of paired differences. Without spread there is no effect size and no t."""

    difference: Estimate
    effect_size: float | None
    p_t: float | None


def estimate(values: Sequence[float]) -> Estimate:
    n, mean = len(values), fmean(values)
    if n < 2:
        return Estimate(n=n, mean=mean, low=None, high=None)
    half = _quantile(n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(n=n, mean=mean, low=mean - half, high=mean + half)


@functools.cache
def _quantile(freedom: int) -> float:
    return float(special.stdtrit(freedom, 0.975))


def paired(differences: Sequence[float]) -> Paired:
    mean_difference = estimate(differences)
    spread = stdev(differences) if len(differences) > 1 else 0.0
    if spread <= 1e-12 * max(abs(d) for d in differences):
        return Paired(difference=mean_difference, effect_size=None, p_t=None)
    n = len(differences)
    p = 2 * special.stdtr(n - 1, -abs(mean_difference.mean) / (spread / math.sqrt(n)))
    return Paired(difference=mean_difference, effect_size=mean_difference.mean / spread, p_t=float(p))


def exact_p(differences: Sequence[float]) -> float:
    """Return the two-sided p over all sign patterns; sums that differ only by rounding count as equal."""
    n = len(differences)
    assert 0 < n <= MAX_EXACT_PAIRS, n
    limit = abs(sum(differences)) - 1e-9 * sum(abs(d) for d in differences)
    if limit <= 0:
        return 1.0
    first, *others = differences  # its sign is fixed: a pattern and its opposite have the same |sum|
    firsts, lasts = _signed_sums(first, others[: n // 2]), sorted(_signed_sums(0.0, others[n // 2 :]))
    above = sum(len(lasts) - bisect_left(lasts, limit - total) for total in firsts)
    below = sum(bisect_right(lasts, -limit - total) for total in firsts)
    return (above + below) / (len(firsts) * len(lasts))


def _signed_sums(start: float, values: Sequence[float]) -> list[float]:
    """Return the sums of start and the values under each pattern of signs."""
    sums = [start]
    for value in values:
        sums = [total + sign * value for total in sums for sign in (1, -1)]
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the corrected p values in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
