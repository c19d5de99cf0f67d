"""What a handful of seeds can say: means with intervals, paired tests, effect sizes, corrected p-values.

    interval        mean +- t(0.975, n - 1) * s / sqrt(n)                      Student's; s has n - 1
    effect size     d_z = mean(d) / s(d) of the paired differences d           Cohen's for pairs
    paired t        p of t = mean(d) / (s(d) / sqrt(n)), two-sided             d normal
    exact           share of the 2^n sign patterns of d whose |sum| is at least that of d
    Holm            p_(i) <- max over j <= i of min(1, (m - j) p_(j)), p sorted, j = 0 .. m - 1

The exact test assumes of the differences only that they are as likely to be positive as negative if the
arms do not differ; its smallest p is 2^(1 - n), 0.0625 for five pairs and 0.002 for ten. Patterns are counted
from the sums of two halves, which takes under a second for 40 pairs. Student's t is found from the incomplete
beta function by its continued fraction (Abramowitz and Stegun 26.5.8), the quantile by bisection.
"""

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import fmean, stdev

MAX_EXACT_PAIRS = 40
_TINY = 1e-300


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimate(n=5, mean=0.8, low=0.7, high=0.9); one value alone has no interval."""

    n: int
    mean: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """What paired differences say. Without spread in them there is neither an effect size nor a t."""

    difference: Estimate
    effect_size: float | None
    p_t: float | None
    p_exact: float


def estimate(values: Sequence[float]) -> Estimate:
    n, mean = len(values), fmean(values)
    if n < 2:
        return Estimate(n=n, mean=mean, low=None, high=None)
    half = t_quantile(0.975, n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(n=n, mean=mean, low=mean - half, high=mean + half)


def paired(differences: Sequence[float]) -> Paired:
    n = len(differences)
    spread = stdev(differences) if n > 1 else 0.0
    mean = fmean(differences)
    has_spread = spread > 1e-12 * max(abs(d) for d in differences) if n > 1 else False
    t = mean / (spread / math.sqrt(n)) if has_spread else None
    return Paired(
        difference=estimate(differences),
        effect_size=mean / spread if has_spread else None,
        p_t=None if t is None else 2 * (1 - t_cdf(abs(t), n - 1)),
        p_exact=exact_p(differences),
    )


def exact_p(differences: Sequence[float]) -> float:
    """Two-sided, over all sign patterns; sums that differ by rounding alone count as equal."""
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
    """Of start and the values, each of them added or taken away."""
    sums = [start]
    for value in values:
        sums = [total + sign * value for total in sums for sign in (1, -1)]
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected p-values in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def t_cdf(t: float, freedom: int) -> float:
    tail = 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)
    return 1 - tail if t >= 0 else tail


def t_quantile(p: float, freedom: int) -> float:
    assert 0.5 <= p < 1 and freedom >= 1, (p, freedom)
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised, I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, the other end's does not
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d_1 / (1 + d_2 / ...)) by Lentz's method."""
    c, d, value = 1.0, 0.0, 1.0
    for i in range(400):
        m = i // 2
        if i == 0:
            term = 1.0
        elif i % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / _away_from_zero(1 + term * d)
        c = _away_from_zero(1 + term / c)
        value *= c * d
        if i and abs(c * d - 1) < 1e-15:
            break
    return value - 1


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
