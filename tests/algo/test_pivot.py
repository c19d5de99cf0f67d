import math

import pytest

from qerl.algo.pivot import Success, Try, chosen, fitted, odds
from qerl.config import DeepConfig

DEEP = DeepConfig(segment_tokens=3, gamma=2.0)


def test_pivots_lie_after_whole_segments_and_late_ones_are_likelier():
    """10 tokens in segments of 3: (3/10)^2, (6/10)^2, (9/10)^2."""
    assert odds(10, None, DEEP) == pytest.approx({3: 0.09, 6: 0.36, 9: 0.81})
    assert odds(9, None, DEEP) == pytest.approx({3: 1 / 9, 6: 4 / 9})
    assert odds(3, None, DEEP) == {} == odds(1, None, DEEP)
    assert odds(10, None, DeepConfig(segment_tokens=3, gamma=0.0)) == {3: 1.0, 6: 1.0, 9: 1.0}


def test_odds_are_weighed_by_the_chance_of_success():
    """slope and base put the chance at 1/4, 1/2, 3/4."""
    success = Success(slope=math.log(3) / 0.3, base=-2 * math.log(3))
    assert odds(10, success, DEEP) == pytest.approx({3: 0.09 / 4, 6: 0.36 / 2, 9: 0.81 * 3 / 4})


def test_a_pivot_is_drawn_in_proportion_to_its_odds():
    """Running shares of 1.26: 3 up to 0.0714, 6 up to 0.3571, 9 up to 1."""
    found = odds(10, None, DEEP)
    expected = {0.0: 3, 0.071: 3, 0.072: 6, 0.357: 6, 0.358: 9, 0.9999999: 9}
    assert {share: chosen(found, share) for share in expected} == expected
    assert chosen({}, 0.5) is None


def test_the_chance_is_fitted_once_both_kinds_are_among_more_than_ten_tries():
    tries = [Try(0.5, i < 3) for i in range(12)]
    assert fitted(tries[:10]) is None and fitted(tries[:11]) is not None
    assert fitted([Try(0.1 * i, True) for i in range(9)] * 2) is None
    assert fitted([Try(0.1 * i, False) for i in range(9)] * 2) is None


def test_where_all_ratios_are_equal_the_chance_is_the_share_of_successes():
    """3 of 12: no slope, for its penalty has nothing to set against; the base is the log odds, ln(1/3)."""
    success = fitted([Try(0.5, i < 3) for i in range(12)])
    assert success is not None
    assert success.slope == pytest.approx(0, abs=1e-8) and success.base == pytest.approx(-math.log(3))
    assert success.at(0.9) == pytest.approx(0.25)


@pytest.mark.parametrize("scale", [1, 500])
@pytest.mark.parametrize("lowest", [0.3, 0.7, 0.95])
def test_the_fit_is_where_the_cost_is_flat(scale, lowest):
    """d/d base = sum (p - y) = 0, d/d slope = sum (p - y) r + slope = 0; also of parted kinds."""
    tries = [Try(i / 20, i / 20 >= lowest or (i % 5 == 0 and lowest < 0.5)) for i in range(1, 21)] * scale
    success = fitted(tries)
    assert success is not None and success.slope > 0
    errors = [success.at(ratio) - succeeded for ratio, succeeded in tries]
    assert sum(errors) == pytest.approx(0, abs=1e-5 * scale)
    slope = -sum(error * each.ratio for error, each in zip(errors, tries, strict=True))
    assert success.slope == pytest.approx(slope, abs=1e-5 * scale)
