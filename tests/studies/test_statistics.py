"""Against numbers worked by hand or read from printed tables."""

import itertools
import math

import numpy as np
import pytest
import scipy

from studies.statistics import estimate, exact_p, holm, paired


def test_an_interval_is_the_mean_and_t_standard_errors():
    # mean 3, s = sqrt(10 / 4), standard error sqrt(0.5)
    found = estimate([1, 2, 3, 4, 5])
    assert (found.n, found.mean) == (5, 3)
    assert found.high == pytest.approx(3 + 2.776445 * math.sqrt(0.5), abs=1e-5)
    assert found.low == pytest.approx(3 - 2.776445 * math.sqrt(0.5), abs=1e-5)


def test_one_value_has_no_interval():
    assert (estimate([2.0]).low, estimate([2.0]).high) == (None, None)


def test_the_exact_p_counts_sign_patterns():
    # |sum| of +-1 +-2 +-3: 6 4 2 0 and their opposites; 6 is reached by 2 of 8, 4 or more by 4 of 8
    assert exact_p([1, 2, 3]) == 2 / 8
    assert exact_p([-1, 2, 3]) == 4 / 8
    assert exact_p([1, 2, -3]) == 1
    assert exact_p([0.1] * 5) == 2 / 32 and exact_p([-0.3] * 10) == 2 / 1024


@pytest.mark.parametrize(
    "differences", [[3.0], [1, -2], [1, -2, 2, 5, -3, 0, 1], [0.1, 0.2, -0.3, 0.4, 0.1, 0.1]]
)
def test_the_exact_p_is_that_of_all_patterns_one_by_one(differences):
    sums = [
        abs(sum(map(float.__mul__, signs, map(float, differences))))
        for signs in itertools.product((1.0, -1.0), repeat=len(differences))
    ]
    assert exact_p(differences) == sum(s >= abs(sum(differences)) - 1e-9 for s in sums) / len(sums)


@pytest.mark.parametrize("n", [2, 5, 10])
def test_the_exact_p_is_that_of_scipy(n):
    differences = np.random.default_rng(n).normal(0.3, 1.0, n)
    found = scipy.stats.permutation_test(
        (differences,), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    assert exact_p(list(differences)) == pytest.approx(found.pvalue)


def test_twenty_seeds_of_two_tasks_have_an_exact_p():
    assert exact_p([0.1] * 40) == 2.0**-39


def test_the_paired_test_is_worked_by_hand():
    # d = 1 2 3: mean 2, s 1, t = 2 sqrt(3); with 2 degrees of freedom p = 1 - t / sqrt(2 + t^2)
    found = paired([1, 2, 3])
    assert found.effect_size == pytest.approx(2)
    assert found.p_t == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-12)


def test_equal_differences_have_no_t():
    found = paired([0.1, 0.1, 0.1])
    assert (found.effect_size, found.p_t) == (None, None)
    assert (found.difference.low, found.difference.high) == pytest.approx((0.1, 0.1))


def test_holm_multiplies_by_what_is_left_and_never_falls():
    # sorted .01 .02 .03 .04: x4 .04, x3 .06, x2 .06, x1 .04 -> .06
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []
