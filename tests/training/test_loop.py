"""The loop with a two-armed bandit for a model: no GPU, no tokens, the same code."""

import contextlib
import dataclasses
import random
from types import SimpleNamespace

import pytest

from qerl.config import AlgoConfig, EvalConfig, NoiseConfig, RunConfig, SampleConfig
from qerl.errors import RunError
from qerl.training.loop import Parts, run
from qerl.training.rollouts.rollout import GroupRollouts
from qerl.types import Group, Prompt, Sample


class Bandit:
    """Engine, learner and policy at once: one probability, moved along its policy gradient."""

    def __init__(self):
        self.version, self.p = 0, 0.5
        self.learned_from: list[list[Group]] = []

    def generate(self, request, *, on_burst=None):
        rng = random.Random(request.seed * 1000 + request.step)
        return [
            Group(prompt=prompt, samples_G=[self._draw(rng) for _ in range(request.num_samples)])
            for prompt in request.prompts_P
        ]

    def _draw(self, rng):
        arm = int(rng.random() < self.p)
        return Sample(tokens_T=[arm], logprobs_T=[0.0], text=str(arm), finish="stop", version=self.version)

    def step(self, groups):
        self.learned_from.append(groups)
        samples = [sample for group in groups for sample in group.samples_G]
        gradient = sum(s.advantage * (s.tokens_T[0] - self.p) for s in samples) / max(1, len(samples))
        self.p, self.version = min(0.99, self.p + gradient * self.p), self.version + 1
        return {"gradient": gradient, "mismatch_abs": 0.001 * self.version}

    def publish(self, version):
        assert version == self.version


class Task:
    def __init__(self):
        self.rounds = []

    def train_prompts(self, step, num_prompts, round=0):
        self.rounds.append((step, round))
        return [Prompt(index=i, text="", tokens_T=[0], messages=None, columns={}) for i in range(num_prompts)]


class Rewards:
    environments = ()

    def score(self, groups):
        return [[float(sample.tokens_T[0]) for sample in group.samples_G] for group in groups]


class Journal:
    """Keeps what a step reports."""

    def __init__(self):
        self.steps = []

    @contextlib.contextmanager
    def step(self, step):
        metrics = {}
        yield SimpleNamespace(
            add=lambda **new: metrics.update(new),
            span=lambda name: contextlib.nullcontext(),
            samples=lambda groups: metrics.update(groups=groups),
        )
        self.steps.append(metrics)


class Noise:
    def __init__(self):
        self.events = []

    @contextlib.contextmanager
    def sampling(self, step):
        self.events.append(("sampling", step))
        yield 0.5
        self.events.append(("quiet", step))

    @contextlib.contextmanager
    def learning(self, step):
        self.events.append(("learning", step))
        yield

    def observe(self, step, metrics):
        self.events.append(("observed", step))
        return {"observed_version": metrics["mismatch_abs"] * 1000}


def bandit_run(config, *, bandit=None, rewards=None, stop_after=None, first_step=0):
    bandit, journal, noise, task = bandit or Bandit(), Journal(), Noise(), Task()
    parts = Parts(
        rollouts=GroupRollouts(config, bandit, rewards or Rewards(), task.train_prompts),
        engine=bandit,
        learner=bandit,
        aqn=noise,
        journal=journal,
        after_update=lambda step, log: None,
        save=lambda step: step == stop_after,
    )
    run(config, parts, first_step=first_step)
    return bandit, journal, noise, task


CONFIG = RunConfig(
    num_steps=20,
    num_prompts=8,
    num_generations=8,
    sample=SampleConfig(max_tokens=4),
    noise=NoiseConfig(schedule="none"),
    evaluate=EvalConfig(success_threshold=1.0),
)


def test_reward_rises():
    bandit, journal, _, _ = bandit_run(CONFIG)
    rewards = [metrics["reward"] for metrics in journal.steps]
    assert bandit.version == 20
    assert rewards[0] < 0.7 and min(rewards[-5:]) > 0.9


def test_noise_is_on_while_sampling_and_gone_before_learning():
    _, journal, noise, _ = bandit_run(dataclasses.replace(CONFIG, num_steps=2))
    names = ("sampling", "quiet", "learning", "observed")
    assert noise.events == [(name, step) for step in (0, 1) for name in names]
    assert journal.steps[0]["sigma"] == 0.5
    assert [metrics["observed_version"] for metrics in journal.steps] == pytest.approx([1, 2])


def test_pass_at_k_and_informative_groups_are_of_all_that_was_drawn():
    class Fixed(Rewards):
        def score(self, groups):
            # one right of eight, all right, none right, one right of the six that are known
            rewards = ([1.0] + [0.0] * 7, [1.0] * 8, [0.0] * 8, [None, None, 1.0] + [0.0] * 5)
            return [rewards[g.prompt.index % 4] for g in groups]

    _, journal, _, _ = bandit_run(dataclasses.replace(CONFIG, num_steps=1), rewards=Fixed())
    metrics = journal.steps[0]
    assert metrics["informative"] == 1 / 2
    assert metrics["pass_at_1"] == pytest.approx((1 / 8 + 1 + 0 + 1 / 6) / 4)
    assert metrics["pass_at_2"] == pytest.approx((1 / 4 + 1 + 0 + 1 / 3) / 4)
    assert metrics["pass_at_4"] == pytest.approx((1 / 2 + 1 + 0 + 2 / 3) / 4)
    assert metrics["pass_at_8"] == pytest.approx((1 + 1 + 0) / 3)


def test_a_run_stops_where_saving_says_so():
    bandit, journal, _, _ = bandit_run(CONFIG, stop_after=4)
    assert bandit.version == len(journal.steps) == 5


def test_a_run_goes_on_from_the_step_it_is_told():
    assert len(bandit_run(CONFIG, first_step=18)[1].steps) == 2


def test_a_failed_reward_is_counted_and_its_sample_has_no_advantage():
    class OneFails(Rewards):
        def score(self, groups):
            return [[None, *rewards_G[1:]] for rewards_G in super().score(groups)]

    bandit, journal, _, _ = bandit_run(CONFIG, rewards=OneFails())
    failed = [group.samples_G[0] for groups in bandit.learned_from for group in groups]
    assert {(sample.reward, sample.advantage) for sample in failed} == {(None, 0.0)}
    assert journal.steps[0]["num_failed_rewards"] == 8


def test_dynamic_sampling_learns_from_informative_groups_only_and_draws_until_it_has_enough():
    class Easy(Rewards):
        def score(self, groups):
            return [
                [1.0] * 8 if g.prompt.index % 2 else r
                for g, r in zip(groups, super().score(groups), strict=True)
            ]

    config = dataclasses.replace(CONFIG, num_steps=1, algo=AlgoConfig(dynamic_sampling=True))
    bandit, journal, _, task = bandit_run(config, rewards=Easy())
    (groups,) = bandit.learned_from
    assert len(groups) == 8 and all(len({s.reward for s in g.samples_G}) == 2 for g in groups)
    assert task.rounds == [(0, 0), (0, 1)] and journal.steps[0]["rounds"] == 2


def test_a_length_penalty_moves_the_advantage_and_leaves_the_reward():
    algo = AlgoConfig(overlong="shape", overlong_buffer=1, advantage="mean")
    config = dataclasses.replace(CONFIG, num_steps=1, algo=algo, sample=SampleConfig(max_tokens=2))

    class LongWhenZero(Bandit):
        def _draw(self, rng):
            sample = super()._draw(rng)
            return (
                sample
                if sample.tokens_T[0]
                else dataclasses.replace(sample, tokens_T=[0, 0], logprobs_T=[0, 0])
            )

    bandit = LongWhenZero()
    bandit_run(config, bandit=bandit)
    group = next(g for g in bandit.learned_from[0] if len({s.reward for s in g.samples_G}) == 2)
    right, wrong = (next(s for s in group.samples_G if s.reward == r) for r in (1.0, 0.0))
    assert right.advantage - wrong.advantage == pytest.approx(2.0)


def test_a_mismatch_over_the_limit_ends_the_run():
    with pytest.raises(RunError, match=r"max_mismatch 0\.0025"):
        bandit_run(dataclasses.replace(CONFIG, max_mismatch=0.0025))
