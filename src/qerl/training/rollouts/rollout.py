"""The rollouts of a step: sample groups, score them, compare each sample with its siblings.

With dynamic sampling (algo/dynamic_sampling.py) prompts are sampled in rounds until num_prompts groups have
unequal rewards.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Protocol

from qerl.algo.advantage import ADVANTAGES, is_informative
from qerl.algo.dynamic_sampling import fill
from qerl.algo.estimate import pass_at_powers
from qerl.algo.overlong import OVERLONG
from qerl.config import AlgoConfig, EvalConfig, RunConfig, SampleConfig, TaskConfig
from qerl.tasks.environment import COLUMN, says_error
from qerl.tasks.reward_means import distinct_names
from qerl.tracking import StepLog
from qerl.training.rollouts.overlap import OverlappedRewards, Rewards
from qerl.training.rollouts.prompt_order import PromptLengths, longest_first
from qerl.types import Episode, GenerateRequest, Group, Prompt, RolloutEngine, Sample, Sampling

_MAX_AGENT_METRICS = 64
TrainPrompts = Callable[[int, int, int], list[Prompt]]
"""(step, num_prompts, round) -> the prompts of that round."""


class Rollouts(Protocol):
    """Source of the groups of each step."""

    def sample(self, step: int, log: StepLog) -> list[Group]:
        """Return the step's groups with rewards and advantages, or with the teacher's logprobs."""
        ...

    def state(self) -> Any:
        """Return what a checkpoint stores, as JSON values."""
        ...

    def load(self, state: Any) -> None: ...


class GroupRollouts:
    """Samples every group of a step at once."""

    def __init__(
        self, config: RunConfig, engine: RolloutEngine, rewards: Rewards, train_prompts: TrainPrompts
    ):
        self._config, self._engine, self._rewards = config, engine, rewards
        self._train_prompts = train_prompts
        self._lengths = PromptLengths()

    def state(self) -> dict[str, float]:
        return self._lengths.state()

    def load(self, state: dict[str, float]) -> None:
        self._lengths.load(state)

    def sample(self, step: int, log: StepLog) -> list[Group]:
        """Return the step's groups with rewards and advantages."""
        config = self._config
        is_dynamic = config.algo.dynamic_sampling
        learned_P, sampled_P, overlap, round = [], [], Counter[str](), 0
        for round in range(config.algo.max_rounds if is_dynamic else 1):
            prompts_P = self._train_prompts(step, config.num_prompts, round)
            scores = OverlappedRewards(config.task, config.model, self._rewards)
            with log.span("rollout"):
                groups_P = self._generate(prompts_P, step, scores)
            with log.span("reward"):
                rewards_P_G = scores.rewards(list(enumerate(groups_P)))
            overlap.update(scores.metrics)
            groups_P = with_advantages(config.algo, config.sample, groups_P, rewards_P_G)
            sampled_P += groups_P
            learned_P = fill(learned_P, groups_P, config.num_prompts) if is_dynamic else groups_P
            if len(learned_P) == config.num_prompts:
                break
        metrics = rollout_metrics(config.task, config.evaluate, sampled_P, self._rewards.environments)
        log.add(**metrics, **overlap, rounds=round + 1)
        return learned_P

    def _generate(self, prompts_P: list[Prompt], step: int, scores: OverlappedRewards) -> list[Group]:
        """Return the groups of the prompts, in order, whichever is sampled first."""
        is_sorted = self._config.rollout.prompt_order == "longest_first"
        order = longest_first(prompts_P, self._lengths) if is_sorted else list(range(len(prompts_P)))
        request = step_request(self._config, [prompts_P[i] for i in order], step)
        sampled_P = self._engine.generate(request, on_burst=scores.on_burst(order))
        if is_sorted:
            self._lengths.add(sampled_P)
        by_place = dict(zip(order, sampled_P, strict=True))
        return [by_place[i] for i in range(len(prompts_P))]


def sampling_of(config: RunConfig) -> Sampling:
    return Sampling(**dataclasses.asdict(config.sample))


def step_request(config: RunConfig, prompts_P: list[Prompt], step: int) -> GenerateRequest:
    """Return the request for the samples of these prompts in a step."""
    return GenerateRequest(
        prompts_P,
        num_samples=config.num_generations,
        sampling=sampling_of(config),
        seed=config.seed,
        step=step,
    )


def with_advantages(
    algo: AlgoConfig, sample: SampleConfig, groups: list[Group], rewards_P_G: list[list[float | None]]
) -> list[Group]:
    """Return the groups with each sample's reward, and its advantage over its siblings."""
    pairs = zip(groups, rewards_P_G, strict=True)
    advantages_P_G = ADVANTAGES[algo.advantage]([_penalize_overlong(algo, sample, *pair) for pair in pairs])
    compared_P = []
    for group, rewards_G, advantages_G in zip(groups, rewards_P_G, advantages_P_G, strict=True):
        triples = zip(group.samples_G, rewards_G, advantages_G, strict=True)
        samples_G = [dataclasses.replace(s, reward=r, advantage=a) for s, r, a in triples]
        compared_P.append(dataclasses.replace(group, samples_G=samples_G))
    return compared_P


def _penalize_overlong(
    algo: AlgoConfig, sample: SampleConfig, group: Group, rewards_G: list[float | None]
) -> list[float | None]:
    """Return the rewards less each sample's length penalty."""
    penalty = OVERLONG[algo.overlong].penalty
    return [
        None if r is None else r + penalty(len(s.tokens_T), sample.max_tokens, algo.overlong_buffer)
        for r, s in zip(rewards_G, group.samples_G, strict=True)
    ]


def drop_overlong(config: RunConfig, groups: list[Group]) -> list[Group]:
    """Return the groups that are learned from: an agent's episode as its parts, and without the samples that
    algo.overlong keeps out of the loss."""
    is_kept = OVERLONG[config.algo.overlong].is_kept
    groups = [part for group in groups for part in learned_parts(group)]
    return [dataclasses.replace(g, samples_G=[s for s in g.samples_G if is_kept(s)]) for g in groups]


def learned_parts(group: Group) -> list[Group]:
    """Return a group for each prompt of the agents' episodes, whose parts have their episode's advantage; a
    group without episodes as it is. An episode's parts are in the order of their tokens: sums in the learner
    then do not depend on which of two requests came first."""
    if all(sample.episode is None for sample in group.samples_G):
        return [group]
    by_prompt: dict[tuple[int, ...], Group] = {}
    for episode in group.samples_G:
        scores = {"reward": episode.reward, "advantage": episode.advantage}
        parts = episode.episode.parts if episode.episode is not None else ()
        for part in sorted(parts, key=lambda each: (each.prompt.tokens_T, each.samples_G[0].tokens_T)):
            group_of_prompt = by_prompt.setdefault(
                tuple(part.prompt.tokens_T),
                Group(prompt=part.prompt, samples_G=[], num_sampled=0, is_after_pivot=group.is_branch),
            )
            group_of_prompt.samples_G.extend(dataclasses.replace(s, **scores) for s in part.samples_G)
    return [dataclasses.replace(each, num_sampled=len(each.samples_G)) for each in by_prompt.values()]


def rollout_metrics(
    task: TaskConfig, evaluate: EvalConfig, groups: list[Group], environments: Sequence[str]
) -> dict[str, float]:
    """Return the metrics of the samples; one without a reward counts in num_failed_rewards only.
    environments: see environment_metrics."""
    samples: list[Sample] = [sample for group in groups for sample in group.samples_G]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [len(sample.logprobs_T) for sample in samples]
    threshold = evaluate.success_threshold
    rewards_P_G = [[s.reward for s in group.samples_G if s.reward is not None] for group in groups]
    metrics = {"reward": fmean(rewards)} if rewards else {}
    return metrics | {
        "informative": fmean(is_informative([s.reward for s in group.samples_G]) for group in groups),
        "distinct": fmean(len({s.text for s in group.samples_G}) / len(group.samples_G) for group in groups),
        "mean_tokens": fmean(lengths),
        "sampled_tokens": sum(lengths),
        "cut_fraction": fmean(sample.finish == "length" for sample in samples),
        "num_failed_rewards": len(samples) - len(rewards) if task.rewards else 0,
        **multi_turn_metrics(samples),
        **environment_metrics(groups, environments),
        **agent_metrics(samples),
        **({} if threshold is None or not rewards else accuracy_metrics(rewards_P_G, threshold)),
    }


def accuracy_metrics(rewards_P_G: list[list[float]], threshold: float) -> dict[str, float]:
    correct_P_G = [[reward >= threshold for reward in rewards_G] for rewards_G in rewards_P_G]
    powers = {f"pass_at_{k}": value for k, value in pass_at_powers(correct_P_G).items()}
    return {"accuracy": fmean(is_correct for correct_G in correct_P_G for is_correct in correct_G), **powers}


def multi_turn_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the metrics of samples that are conversations with an environment; empty if none is.

    turns: mean number of the policy's turns. tool_calls: messages of tools; tool_failures: those that
    say that they are an error. environment_tokens: tokens that are not learned from."""
    conversations = [s.messages for s in samples if s.messages is not None and s.episode is None]
    if not conversations:
        return {}
    roles = [[message["role"] for message in messages] for messages in conversations]
    results = [m["content"] for messages in conversations for m in messages if m["role"] == "tool"]
    return {
        "turns": fmean(each.count("assistant") for each in roles),
        "tool_calls": len(results),
        "tool_failures": sum(map(says_error, results)),
        "learned_tokens": sum(len(s.logprobs_T) for s in samples if s.reward is not None),
        "environment_tokens": sum(len(span) for sample in samples for span in sample.environment_spans),
        "num_episodes": len(samples),
        "num_failed_episodes": sum(sample.failure is not None for sample in samples),
    }


def environment_metrics(groups: list[Group], environments: Sequence[str]) -> dict[str, float]:
    """Return reward_in_NAME, turns_in_NAME and failed_in_NAME of the episodes of each environment of a run
    that has several; a row's column says which one is its own. environments: their names. A column of this
    name that another run's data has names nothing: its values are as many as there are rows."""
    by_name: dict[str, list[Sample]] = {name: [] for name in environments}
    for group in groups:
        name = group.prompt.columns.get(COLUMN)
        if isinstance(name, str) and name in by_name:
            by_name[name] += (each for each in group.samples_G if each.messages is not None)
    metrics: dict[str, float] = {}
    keys = distinct_names([re.sub(r"\W+", "_", name) for name in by_name])
    for key, samples in zip(keys, by_name.values(), strict=True):
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        turns = [sum(m["role"] == "assistant" for m in sample.messages or ()) for sample in samples]
        if rewards:
            metrics |= {f"reward_in_{key}": fmean(rewards)}
        if samples:
            failed = sum(sample.failure is not None for sample in samples)
            metrics |= {f"turns_in_{key}": fmean(turns), f"failed_in_{key}": failed}
    return metrics


def agent_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the metrics of samples that are episodes of an agent; empty if none is.

    turns: mean number of the model's answers. tool_failures: results of tools that say that they are an
    error. malformed_calls: begun by the model, but no calls of offered functions. restricted_tokens:
    sampled where a grammar did not allow every token. waiting_share: mean share of an episode's time in
    which no call of the model was running.
    episode_parts: mean number of samples that an episode is learned from as."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    allowed = [each.allowed for episode in episodes for part in episode.parts for each in part.samples_G]
    is_restricted = [index is not None for each in allowed if each is not None for index in each.set_C]
    return {
        "turns": fmean(episode.num_turns for episode in episodes),
        "tool_calls": sum(episode.num_tool_calls for episode in episodes),
        "tool_failures": sum(episode.num_tool_failures for episode in episodes),
        "malformed_calls": sum(episode.num_malformed_calls for episode in episodes),
        "environment_tokens": sum(len(span) for sample in samples for span in sample.environment_spans),
        "restricted_tokens": sum(is_restricted),
        "learned_tokens": sum(len(s.logprobs_T) for s in samples if s.reward is not None),
        "episode_parts": fmean(len(episode.parts) for episode in episodes),
        "waiting_share": fmean(episode.waiting_share for episode in episodes),
        "num_episodes": len(samples),
        "num_failed_episodes": sum(sample.failure is not None for sample in samples),
        **returned_metrics(episodes),
    }


def returned_metrics(episodes: list[Episode]) -> dict[str, float]:
    """Return agent_NAME: the mean of each number that an agent returned beside its reward; of many names
    those that most episodes returned, since an agent may make a name of its row."""
    named: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            named.setdefault(f"agent_{name}", []).append(value)
    most_common = sorted(named, key=lambda name: (-len(named[name]), name))[:_MAX_AGENT_METRICS]
    return {name: fmean(named[name]) for name in sorted(most_common)}
