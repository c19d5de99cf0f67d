"""The training loop: prompts -> samples -> rewards -> advantages -> update -> publish.

Everything else in this package is called from here.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any, Protocol

from qerl.algo.advantage import ADVANTAGES, is_informative
from qerl.algo.dynamic_sampling import fill
from qerl.algo.estimate import pass_at_powers
from qerl.algo.overlong import OVERLONG
from qerl.config import RunConfig
from qerl.errors import RunError
from qerl.learner.learner import Learner
from qerl.types import Group, Prompt, RolloutEngine, Sample, Sampling


class Task(Protocol):
    def train_prompts(self, step: int, num_prompts: int, round: int = 0) -> list[Prompt]: ...


class Rewards(Protocol):
    def attempt(self, groups: list[Group]) -> list[list[float | None]]: ...

    def check_some(self, rewards_P_G: list[list[float | None]]) -> None:
        """UserError if there are samples, and not one has a reward: why, by the latest attempt."""
        ...

    def score(self, groups: list[Group]) -> list[list[float | None]]:
        """An attempt, checked."""
        ...


class Noise(Protocol):
    def sampling(self, step: int) -> AbstractContextManager[float]:
        """Inside, the sampling policy is noisy; gives sigma."""
        ...

    def learning(self, step: int) -> AbstractContextManager[Any]:
        """Inside, the learner's forward is as noisy as the config says."""
        ...

    def observe(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Steers the noise of the steps to come; what there is to log of it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a step works with."""

    task: Task
    rewards: Rewards
    engine: RolloutEngine
    learner: Learner
    noise: Noise
    draw: Callable[[RunConfig, "Parts", int, Any], list[Group]]
    """(config, parts, step, log): the step's groups with their advantages, as `draw` below makes them."""
    journal: Any
    observe: Callable[[int, Any], None]
    """(step, log): adds to the log what is measured beside the loop, such as held-out accuracy."""
    save: Callable[[int], bool]
    """(step): makes a checkpoint where it is due; whether the run is to stop here."""


def run(config: RunConfig, parts: Parts, *, first_step: int) -> None:
    for step in range(first_step, config.num_steps):
        with parts.journal.step(step) as log:
            with parts.noise.sampling(step) as sigma:
                groups = parts.draw(config, parts, step, log)
            log.samples(groups)
            with parts.noise.learning(step), log.span("learn"):
                metrics = parts.learner.step([drop_unrewarded(config, group) for group in groups])
            log.add(sigma=sigma, **metrics, **parts.noise.observe(step, metrics))
            with log.span("publish"):
                parts.engine.publish(parts.learner.version)
            parts.observe(step, log)
        check_mismatch(config, metrics)
        if parts.save(step):
            return


def draw(config: RunConfig, parts: Parts, step: int, log: Any) -> list[Group]:
    """Sample, score and compare; with dynamic sampling until num_prompts groups have something to teach."""
    sampling = sampling_of(config)
    kept_P, drawn_P, round = [], [], 0
    for round in range(config.algo.max_rounds if config.algo.dynamic_sampling else 1):
        prompts_P = parts.task.train_prompts(step, config.num_prompts, round)
        with log.span("rollout"):
            sampled_P = parts.engine.generate(
                prompts_P, num_samples=config.num_generations, sampling=sampling, seed=config.seed, step=step
            )
        with log.span("reward"):
            rewards_P_G = parts.rewards.score(sampled_P)
        scored_P = with_advantages(config, sampled_P, rewards_P_G)
        drawn_P += scored_P
        kept_P = fill(kept_P, scored_P, config.num_prompts) if config.algo.dynamic_sampling else scored_P
        if len(kept_P) == config.num_prompts:
            break
    log.add(**rollout_metrics(config, drawn_P), rounds=round + 1)
    return kept_P


def sampling_of(config: RunConfig) -> Sampling:
    return Sampling(**dataclasses.asdict(config.sample))


def with_advantages(
    config: RunConfig, groups: list[Group], rewards_P_G: list[list[float | None]]
) -> list[Group]:
    """The groups with each sample's reward, and its advantage over its siblings."""
    penalised_P_G = [penalize_overlong(config, *pair) for pair in zip(groups, rewards_P_G, strict=True)]
    advantages_P_G = ADVANTAGES[config.algo.advantage](penalised_P_G)
    marked_P = []
    for group, rewards_G, advantages_G in zip(groups, rewards_P_G, advantages_P_G, strict=True):
        marks = zip(group.samples_G, rewards_G, advantages_G, strict=True)
        samples_G = [dataclasses.replace(s, reward=r, advantage=a) for s, r, a in marks]
        marked_P.append(dataclasses.replace(group, samples_G=samples_G))
    return marked_P


def penalize_overlong(config: RunConfig, group: Group, rewards_G: list[float | None]) -> list[float | None]:
    """The rewards with what a sample's length takes off them."""
    penalty, max_tokens = OVERLONG[config.algo.overlong].penalty, config.sample.max_tokens
    return [
        None if r is None else r + penalty(len(s.tokens_T), max_tokens, config.algo.overlong_buffer)
        for r, s in zip(rewards_G, group.samples_G, strict=True)
    ]


def drop_unrewarded(config: RunConfig, group: Group) -> Group:
    """The group without the samples that have no reward, or that the config leaves out for their length."""
    is_kept = OVERLONG[config.algo.overlong].is_kept
    samples_G = [s for s in group.samples_G if s.reward is not None and is_kept(s)]
    return dataclasses.replace(group, samples_G=samples_G)


def rollout_metrics(config: RunConfig, groups: list[Group]) -> dict[str, float]:
    """What the samples say of the policy; rewards that failed count nowhere but in num_failed_rewards."""
    samples: list[Sample] = [sample for group in groups for sample in group.samples_G]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [len(sample.logprobs_T) for sample in samples]
    right_P_G = [
        [s.reward >= config.evaluate.success_threshold for s in group.samples_G if s.reward is not None]
        for group in groups
    ]
    return {
        "reward": fmean(rewards),
        "accuracy": fmean(reward >= config.evaluate.success_threshold for reward in rewards),
        "informative": fmean(is_informative([s.reward for s in group.samples_G]) for group in groups),
        "distinct": fmean(len({s.text for s in group.samples_G}) / len(group.samples_G) for group in groups),
        "mean_tokens": fmean(lengths),
        "sampled_tokens": sum(lengths),
        "cut_fraction": fmean(sample.finish == "length" for sample in samples),
        "num_failed_rewards": len(samples) - len(rewards),
        **multi_turn_metrics(samples),
        **{f"pass_at_{k}": value for k, value in pass_at_powers(right_P_G).items()},
    }


def multi_turn_metrics(samples: list[Sample]) -> dict[str, float]:
    """Of samples that talked with an environment: turns of the policy, a sample's mean; what tools said; the
    tokens that are not learned from."""
    talks = [sample.messages for sample in samples if sample.messages is not None]
    if not talks:
        return {}
    roles = [[message["role"] for message in messages] for messages in talks]
    return {
        "turns": fmean(each.count("assistant") for each in roles),
        "tool_calls": sum(each.count("tool") for each in roles),
        "given_tokens": sum(len(places) for sample in samples for places in sample.environment_spans),
        "num_failed_episodes": sum(sample.failure is not None for sample in samples),
    }


def check_mismatch(config: RunConfig, metrics: dict[str, float]) -> None:
    """A mismatch that is no number is over any limit."""
    mismatch, limit = metrics.get("mismatch_abs", 0.0), config.max_mismatch
    if limit is not None and not mismatch <= limit:
        raise RunError(
            f"the sampler and the learner differ by {mismatch:.3g} nats a token, max_mismatch is {limit}"
        )
