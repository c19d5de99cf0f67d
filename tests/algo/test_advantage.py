import math

import pytest

from qerl.algo.advantage import (
    ADVANTAGES,
    beta_density,
    beta_normalised,
    beta_of_moments,
    group_normalised,
    is_informative,
    leave_one_out,
    mean_only,
)
from qerl.errors import UserError

FEW, MANY = [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]


def test_group_divides_by_the_unbiased_std_plus_epsilon():
    # mean 2, deviations -2, -1, 0, 3, squares 14, std sqrt(14 / 3)
    scale = math.sqrt(14 / 3) + 1e-4
    assert group_normalised([0.0, 1.0, 2.0, 5.0]) == pytest.approx(
        [-2 / scale, -1 / scale, 0.0, 3 / scale], rel=1e-12
    )


def test_one_right_of_four():
    # mean 1/4, std 1/2: +1.5 and -0.5, each shrunk by 0.5 / 0.5001
    assert group_normalised([0.0, 0.0, 1.0, 0.0]) == pytest.approx(
        [-0.4999000, -0.4999000, 1.4997001, -0.4999000], abs=1e-7
    )


def test_batch_divides_each_group_by_the_std_of_all_rewards():
    # of 0 2 | 4 10: mean 4, squares 16 + 4 + 0 + 36 = 56, std sqrt(56 / 3); groups' means 1 and 7
    scale = math.sqrt(56 / 3) + 1e-4
    got = ADVANTAGES["batch"]([[0.0, 2.0], [4.0, 10.0]])
    assert [a for group in got for a in group] == pytest.approx(
        [-1 / scale, 1 / scale, -3 / scale, 3 / scale], rel=1e-12
    )


def test_mean_only_keeps_the_scale_of_the_rewards():
    assert mean_only([0.0, 10.0, 2.0, 0.0]) == [-3.0, 7.0, -1.0, -3.0]


def test_leave_one_out_compares_with_the_others_only():
    # others' means: (1+5)/2, (0+5)/2, (0+1)/2
    assert leave_one_out([0.0, 1.0, 5.0]) == pytest.approx([-3.0, -1.5, 4.5], rel=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1.0])
def test_equal_rewards_give_exact_zeros(name, reward):
    assert ADVANTAGES[name]([[reward] * 3]) == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_failed_reward_changes_nothing_for_its_siblings(name):
    (with_failure, _), (without, _) = (
        ADVANTAGES[name]([rewards_G, MANY]) for rewards_G in ([None, 0.0, 0.25, None, 1.0], [0.0, 0.25, 1.0])
    )
    assert with_failure == [0.0, without[0], without[1], 0.0, without[2]]
    assert without[2] > 0


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rewards_G", [[], [None, None], [None, 0.5]])
def test_fewer_than_two_rewards_compare_to_nothing(name, rewards_G):
    assert ADVANTAGES[name]([rewards_G, FEW])[0] == [0.0] * len(rewards_G)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_sum_to_zero(name):
    for advantages_G in ADVANTAGES[name]([[0.0, 0.2, 1.0, 0.2, None, 0.9], FEW, MANY]):
        assert sum(advantages_G) == pytest.approx(0.0, abs=1e-12)
        assert max(advantages_G) > 0


def test_only_beta_and_batch_look_at_other_groups():
    for name, advantages in ADVANTAGES.items():
        alone, among = advantages([FEW])[0], advantages([FEW, MANY, MANY])[0]
        assert (alone == among) == (name not in ("beta", "batch"))


def test_beta_by_hand():
    # means 1/4, 1/4, 3/4, 3/4: mean 1/2, unbiased variance 1/12, a + b = (1/4) / (1/12) - 1 = 2, a = b = 1
    # f(x; 4/3, 4/3) = (x (1 - x))^(1/3) gamma(8/3) / gamma(4/3)^2
    density = (3 / 16) ** (1 / 3) * math.gamma(8 / 3) / math.gamma(4 / 3) ** 2
    got = beta_normalised([FEW, FEW, MANY, MANY])
    low, high = 0.25 / density, 0.75 / density
    assert got[0] == pytest.approx([-low, -low, high, -low], rel=1e-12)
    assert got[3] == pytest.approx([low, low, -high, low], rel=1e-12)


def test_groups_without_news_shape_the_density_too():
    # means 0, 1/4, 3/4, 1: mean 1/2, variance 5/24, a + b = (1/4) / (5/24) - 1 = 1/5, a = b = 1/10
    shape = 1 + 0.1 / 3
    density = (3 / 16) ** (shape - 1) * math.gamma(2 * shape) / math.gamma(shape) ** 2
    got = beta_normalised([[0.0] * 4, FEW, MANY, [1.0] * 4])
    assert got[1] == pytest.approx([x / density for x in mean_only(FEW)], rel=1e-12)
    assert got[0] == got[3] == [0.0] * 4


def test_where_no_beta_distribution_has_the_moments_the_mean_alone_is_taken_off():
    assert beta_of_moments([0.25, 0.25]) is None and beta_of_moments([0.0, 1.0]) is None
    assert beta_of_moments([0.5]) is None
    assert beta_normalised([FEW, FEW]) == [mean_only(FEW)] * 2


def test_the_fitted_beta_has_the_moments():
    a, b = beta_of_moments([0.1, 0.4, 0.7, 0.2]) or (0, 0)
    mean, spread = 0.35, (0.25**2 + 0.05**2 + 0.35**2 + 0.15**2) / 3
    assert a / (a + b) == pytest.approx(mean, rel=1e-12)
    assert a * b / ((a + b) ** 2 * (a + b + 1)) == pytest.approx(spread, rel=1e-12)


def test_the_density_of_grpo_is_the_standard_deviation():
    """The paper's remark: with a = b = 3/2, r - p is divided by sqrt(p (1 - p)) but for a constant."""
    for p in (0.1, 0.5, 0.8):
        assert beta_density(p, 1.5, 1.5) == pytest.approx(8 / math.pi * math.sqrt(p * (1 - p)), rel=1e-12)
    assert beta_density(0.3, 1.0, 1.0) == pytest.approx(1.0, rel=1e-12)


def test_rounding_of_weighed_rewards_is_no_spread_and_no_way_out_of_the_interval():
    equal = [[0.1, 0.5], [0.2, 0.4]]  # means 0.3 and 0.30000000000000004
    assert beta_normalised(equal) == [mean_only(rewards_G) for rewards_G in equal]
    nearly = 0.7 + 0.2 + 0.1
    right, _ = beta_normalised([[1.0, 1.0, nearly], [0.0, 0.5, 1.0]])
    assert nearly < 1 and max(map(abs, right)) < 1e-9
    assert beta_normalised([[1.0 + 2e-16, 0.0], FEW])


def test_beta_refuses_rewards_that_are_no_probabilities():
    with pytest.raises(UserError, match=r"beta needs rewards from 0 to 1, got 1\.1"):
        beta_normalised([FEW, [0.0, 1.1]])


def test_a_group_informs_when_two_rewards_differ():
    assert is_informative([0.0, None, 1.0])
    assert not is_informative([1.0, None, 1.0])
    assert not is_informative([None, 1.0])
    assert not is_informative([])


def test_a_reward_that_is_not_a_number_is_our_mistake():
    with pytest.raises(AssertionError):
        mean_only([0.0, math.nan])
