import math

import pytest

from qerl.algo.advantage import ADVANTAGES, group_normalised, is_informative, leave_one_out, mean_only


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


def test_mean_only_keeps_the_scale_of_the_rewards():
    assert mean_only([0.0, 10.0, 2.0, 0.0]) == [-3.0, 7.0, -1.0, -3.0]


def test_leave_one_out_compares_with_the_others_only():
    # others' means: (1+5)/2, (0+5)/2, (0+1)/2
    assert leave_one_out([0.0, 1.0, 5.0]) == pytest.approx([-3.0, -1.5, 4.5], rel=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e9])
def test_equal_rewards_give_exact_zeros(name, reward):
    assert ADVANTAGES[name]([reward] * 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_failed_reward_changes_nothing_for_its_siblings(name):
    with_failure = ADVANTAGES[name]([None, 0.0, 1.0, None, 4.0])
    without = ADVANTAGES[name]([0.0, 1.0, 4.0])
    assert with_failure == [0.0, without[0], without[1], 0.0, without[2]]
    assert without[2] > 0


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("rewards_G", [[], [None, None], [None, 3.0]])
def test_fewer_than_two_rewards_compare_to_nothing(name, rewards_G):
    assert ADVANTAGES[name](rewards_G) == [0.0] * len(rewards_G)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_sum_to_zero(name):
    assert sum(ADVANTAGES[name]([0.0, 0.2, 2.2, 0.2, None, 2.0])) == pytest.approx(0.0, abs=1e-12)


def test_a_group_informs_when_two_rewards_differ():
    assert is_informative([0.0, None, 1.0])
    assert not is_informative([1.0, None, 1.0])
    assert not is_informative([None, 1.0])
    assert not is_informative([])


def test_a_reward_that_is_not_a_number_is_our_mistake():
    with pytest.raises(AssertionError):
        mean_only([0.0, math.nan])
