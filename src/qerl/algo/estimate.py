"""Estimates from several samples per prompt: pass@k, a mean with its standard error, a majority vote.

    pass@k = 1 - C(n - c, k) / C(n, k)            n samples, c of them correct; unbiased
    mean = mean_p m_p        m_p = mean over the samples of prompt p
    error = std_p(m_p) / sqrt(P)                  the std divided by P - 1

Samples of one prompt are correlated, so the error counts prompts, not samples: treating them as n P
independent draws would make it too small. pass@k: Chen et al., arXiv 2107.03374, 2.1.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that at least one of k samples, drawn without replacement, is correct."""
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_powers(correct_P_G: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... up to the largest group, over the groups with at least k samples."""
    largest = max(map(len, correct_P_G), default=0)
    return {
        k: fmean(pass_at_k(len(c_G), sum(c_G), k) for c_G in correct_P_G if len(c_G) >= k)
        for k in (1 << i for i in range(largest.bit_length()))
    }


def clustered_mean(values_P_G: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Return the mean over prompts and its standard error (None for a single prompt)."""
    means_P = [fmean(values_G) for values_G in values_P_G]
    error = stdev(means_P) / math.sqrt(len(means_P)) if len(means_P) > 1 else None
    return fmean(means_P), error


def majority_vote(answers_G: Sequence[str | None]) -> str | None:
    """Return the most frequent answer, the earliest one of ties; None if there is none. None does not
    vote."""
    votes = Counter(answer for answer in answers_G if answer is not None)
    return max(votes, key=votes.__getitem__) if votes else None
