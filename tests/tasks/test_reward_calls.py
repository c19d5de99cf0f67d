"""Reward functions that see a group or a batch: what they get, and what a failure costs."""

import functools
import os
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from material import group
from qerl import batch_reward, group_reward
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import RewardPool
from qerl.training.engines.data_parallel import DataParallelRewards


@group_reward
def best_of_group(completions, answer, **columns):
    """1 for the longest text of the call."""
    longest = max(map(len, completions))
    return [float(len(text) == longest) for text in completions]


@group_reward
def odd(completions):
    """Fails in the way that a text of the call says."""
    ways = {
        "raise": lambda: [1 / 0],
        "exit": lambda: os._exit(1),
        "hang": lambda: time.sleep(600),
        "short": lambda: [1.0],
        "nan": lambda: [float("nan") if text == "nan" else 1.0 for text in completions],
    }
    return next((ways[text] for text in completions if text in ways), lambda: [1.0 for _ in completions])()


def num_seen(completions):
    return [float(len(completions)) for _ in completions]


def scored(functions, groups, **fields):
    with RewardPool(TaskConfig(**fields), functions) as pool:
        return pool.score(groups), pool.take_means()


def test_a_reward_compares_the_samples_of_each_group():
    groups = [group("a", "bbb", "cc", answer="1"), group("dd", "e", answer="2")]
    rewards_P_G, _ = scored([best_of_group], groups)
    assert rewards_P_G == [[0.0, 1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize(("scope", "sizes"), [("sample", (1, 1)), ("group", (3, 2)), ("batch", (5, 5))])
def test_the_config_says_what_a_function_without_a_decorator_sees(scope, sizes):
    rewards_P_G, _ = scored([num_seen], [group("a", "b", "c"), group("d", "e")], reward_scope=scope)
    assert rewards_P_G == [[sizes[0]] * 3, [sizes[1]] * 2]


def test_a_decorator_goes_before_the_config_and_is_seen_through_a_partial():
    whole = group_reward(functools.partial(num_seen))
    assert scored([whole], [group("a", "b")], reward_scope="batch")[0] == [[2.0, 2.0]]
    assert scored([functools.partial(odd)], [group("a", "b")])[0] == [[1.0, 1.0]]


def test_a_batch_has_the_samples_of_all_groups_in_order_with_their_columns():
    @batch_reward
    def place(completions, answer, **columns):
        return [i + 100 * int(right) for i, right in enumerate(answer)]

    groups = [group("a", "b", answer="1"), group(answer="7"), group("c", answer="2")]
    rewards_P_G, _ = scored([place], groups)
    assert rewards_P_G == [[100.0, 101.0], [], [202.0]]


@pytest.mark.parametrize("way", ["raise", "exit", "hang", "short"])
@pytest.mark.parametrize("decorate", [group_reward, batch_reward])
def test_a_failure_costs_its_group_only(decorate, way):
    function = decorate(lambda completions: odd(completions))
    groups = [group("a", "b"), group("c", way), group("d", "e")]
    rewards_P_G, metrics = scored([function], groups, reward_timeout_s=1.0)
    assert rewards_P_G == [[1.0, 1.0], [None, None], [1.0, 1.0]]
    assert metrics["num_failed_reward_groups"] == 1
    assert metrics.get("num_split_reward_batches", 0) == (decorate is batch_reward)


def test_a_value_that_is_no_number_costs_its_sample_only():
    rewards_P_G, metrics = scored([odd], [group("a", "nan", "b")])
    assert rewards_P_G == [[1.0, None, 1.0]] and metrics["num_failed_reward_groups"] == 0


def test_a_batch_of_one_group_that_fails_is_not_called_again():
    @batch_reward
    def breaks(completions):
        raise ValueError("once")

    with RewardPool(TaskConfig(), [breaks]) as pool:
        with pytest.raises(UserError, match="2 of 2 failed: raised ValueError: breaks: once"):
            pool.score([group("a", "b")])
        assert pool.take_means() == {"num_failed_reward_groups": 1}


def test_functions_of_all_scopes_are_summed_by_weight_and_have_their_means():
    def is_a(completions):
        return [float(text == "a") for text in completions]

    @batch_reward
    def last(completions):
        return [8, None, 4]

    functions = [is_a, group_reward(functools.partial(num_seen)), last]
    fields = {"rewards": ("x",) * 3, "reward_weights": (0.7, 0.2, 0.1)}
    rewards_P_G, metrics = scored(functions, [group("a", "b"), group("c")], **fields)
    assert rewards_P_G == [[1.9, 0.4], [pytest.approx(0.6)]]
    assert metrics == {
        "rewards/is_a/mean": pytest.approx(1 / 3),
        "rewards/last/mean": 6,
        "rewards/partial/mean": pytest.approx(5 / 3),
        "num_split_reward_batches": 0,
        "num_failed_reward_groups": 0,
    }


def test_groups_that_are_added_while_others_are_sampled_get_the_same_rewards():
    groups = [group("a", "bbb", answer="1"), group("dd", "e", answer="2"), group("f", answer="3")]
    with RewardPool(TaskConfig(), [best_of_group, batch_reward(num_seen)]) as pool:
        scoring = pool.begin()
        scoring.add(1, groups[1])
        scoring.poll()
        assert scoring.rewards(list(enumerate(groups))) == pool.attempt(groups)
        del num_seen.reward_scope


def test_built_in_rewards_see_a_sample_whatever_the_config_says():
    with RewardPool(TaskConfig(rewards=("numeric", "length"), reward_scope="batch")) as pool:
        assert pool.score([group("33", "3", answer="3"), group("7", answer="3")]) == [[-1.0, 1.0], [0.0]]
        assert not pool.is_built_in  # 1 is not a correct sample


def test_a_run_of_several_ranks_says_that_a_batch_is_one_ranks_share():
    with RewardPool(TaskConfig(reward_scope="batch"), [num_seen, best_of_group]) as pool:
        assert pool.rank_notices(1) == []
        (line,) = pool.rank_notices(2)
    assert line == "num_seen: a call for a batch has the samples of one of 2 ranks, not all of the step"


def test_counts_of_several_ranks_are_added_and_zero_is_one():
    pool = SimpleNamespace(take_counts=Counter, take_sums=dict)
    both = [Counter(num_failed_reward_groups=0, num_split_reward_batches=2)] * 2
    ranks = SimpleNamespace(gather=lambda value: both if isinstance(value, Counter) else [value])
    means = DataParallelRewards(pool, ranks).take_means()
    assert means == {"num_failed_reward_groups": 0, "num_split_reward_batches": 4}
