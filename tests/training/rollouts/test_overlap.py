"""Rewards of finished groups run while others are sampled, and are those of scoring after sampling."""

import dataclasses
import os
import time

import pytest

from engine.parts import engine_of, prompts_of, request_of
from models.tiny import tiny
from qerl.config import EvalConfig, ModelConfig, NoiseConfig, RunConfig, SampleConfig, TaskConfig
from qerl.tasks import RewardPool
from qerl.training.rollouts.overlap import overlaps
from qerl.training.rollouts.rollout import GroupRollouts
from training.rollouts.test_partial import Log

CONFIG = RunConfig(
    num_prompts=5,
    num_generations=3,
    sample=SampleConfig(max_tokens=12),
    noise=NoiseConfig(schedule="none"),
    evaluate=EvalConfig(success_threshold=1.0),
    task=TaskConfig(reward_overlap="always", reward_timeout_s=60.0),
)
NEVER = dataclasses.replace(CONFIG, task=dataclasses.replace(CONFIG.task, reward_overlap="never"))
LAST = 4


@pytest.fixture(scope="module")
def decoder():
    return tiny()


def train_prompts(step, num_prompts, round=0):
    found = prompts_of(*range(5, 5 + num_prompts))
    return [dataclasses.replace(prompt, columns={"number": prompt.index}) for prompt in found]


def at_once(decoder):
    """An engine that samples one group of three at a time."""
    return engine_of(decoder, max_num_seqs=3, decode_steps_per_sync=2)


class Patient:
    """The engine, which waits at the last prompt's tokens until what it waits for is so."""

    def __init__(self, engine, is_so, *, limit_s=60.0):
        self.engine, self.is_so, self.limit_s, self.was_so = engine, is_so, limit_s, []

    def generate(self, request, **callbacks):
        def on_token(index, sample_index, token, sample):
            if index == LAST:
                end_s = time.monotonic() + (self.limit_s if not self.was_so else 0)
                while not self.is_so() and time.monotonic() < end_s:
                    time.sleep(0.01)
                self.was_so.append(self.is_so())
            return False

        return self.engine.generate(request, on_token=on_token, **callbacks)


def test_the_first_groups_reward_is_called_before_the_last_one_ends(decoder, tmp_path):
    def reward(prompts, completions, number):
        (tmp_path / str(number[0])).touch()
        return [float(len(completions[0]))]

    for config, is_called in ((NEVER, False), (CONFIG, True)):
        limit_s = 60.0 if is_called else 1.0  # without overlap nothing comes, however long it waits
        engine = Patient(at_once(decoder), lambda: (tmp_path / "0").exists(), limit_s=limit_s)
        log = Log()
        with RewardPool(config.task, functions=[reward]) as pool:
            groups = GroupRollouts(config, engine, pool, train_prompts).sample(0, log)
        assert engine.was_so[0] == is_called and len(engine.was_so) >= 3
        assert {path.name for path in tmp_path.iterdir()} == set("01234")
        for path in tmp_path.iterdir():
            path.unlink()
        assert [s.reward for g in groups for s in g.samples_G] == [
            float(len(s.text)) for g in groups for s in g.samples_G
        ]
        assert ("reward_overlap_s" in log.metrics) == is_called
        assert not is_called or log.metrics["reward_overlap_s"] > 0


def unreliable(prompts, completions, completion_ids, number):
    """Abstains, fails and ends its process, each for samples of its own."""
    kind = sum(completion_ids[0]) % 7
    if kind == 0:
        return [None]
    if kind == 1:
        raise ValueError(f"no reward for prompt {number[0]}")
    if kind == 2:
        os._exit(3)
    return [float(sum(completion_ids[0])) / 3]


def test_rewards_failures_and_metrics_are_those_of_scoring_afterwards(decoder):
    found = []
    for config in (CONFIG, NEVER):
        log = Log()
        with RewardPool(config.task, functions=[unreliable, length], agent=None) as pool:
            rollouts = GroupRollouts(config, at_once(decoder), pool, train_prompts)
            groups = [rollouts.sample(step, log) for step in range(2)]
            failures = pool.take_failures()
        log.metrics.pop("reward_overlap_s", None)
        found.append((groups, failures, log.metrics))
    assert found[0] == found[1]
    rewards = [s.reward for groups in found[0][0] for g in groups for s in g.samples_G]
    assert None in rewards and len(set(rewards)) > 5
    assert {"raised ValueError", "ended its process"} <= set(found[0][1])


def length(completions, **columns):
    return [0.1 * len(completions[0])]


def test_the_engine_tells_of_each_group_once_in_the_burst_that_ends_it(decoder):
    request, told, bursts = request_of(train_prompts(0, 5)), [], []

    def on_burst(ended):
        told.extend(ended)
        bursts.append(len(told))

    engine = at_once(decoder)
    groups = engine.generate(request, on_burst=on_burst)
    assert groups == at_once(decoder).generate(request)
    places = [index for index, _ in told]
    assert len(places) == len(set(places)) and 3 <= len(places) <= 5
    assert all(group is groups[index] for index, group in told)
    assert set(bursts) >= {0, 1, 2, 3}


def test_an_engine_that_fails_leaves_no_rewards_to_the_next_step(decoder):
    class Failing(Patient):
        def is_failing(self):
            raise RuntimeError("the engine has failed")

    with RewardPool(CONFIG.task, functions=[length]) as pool:
        failing = Failing(at_once(decoder), None)
        failing.is_so = failing.is_failing
        with pytest.raises(RuntimeError, match="has failed"):
            GroupRollouts(CONFIG, failing, pool, train_prompts).sample(0, Log())
        groups = GroupRollouts(CONFIG, at_once(decoder), pool, train_prompts).sample(0, Log())
    rewards = [s.reward for g in groups for s in g.samples_G]
    assert rewards == [0.1 * len(s.text) for g in groups for s in g.samples_G]


@pytest.mark.parametrize(
    ("device", "rewards", "value", "expected"),
    [
        ("cpu", ("numeric",), "auto", False),
        ("cpu", ("judge",), "auto", True),
        ("cpu", ("judge", "numeric"), "auto", False),
        ("cpu", ("numeric",), "always", True),
        ("cuda", ("numeric",), "auto", True),
        ("cuda", ("judge",), "never", False),
    ],
)
def test_by_default_rewards_overlap_where_they_do_not_slow_sampling(device, rewards, value, expected):
    task = TaskConfig(rewards=rewards, reward_overlap=value)
    config = dataclasses.replace(CONFIG, model=ModelConfig(device=device), task=task)
    assert overlaps(config.task, config.model) == expected
