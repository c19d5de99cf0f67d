"""Rewards of a step's samples, by functions in TRL's form run in processes that can be killed.

    f(prompts, completions, completion_ids, **columns) -> list[float | None]
    class E, with reset and step: an environment (environment.py); its episode is the sample

prompts and completions are strings, or lists of messages where the prompt is a conversation (a tokenizer with
a chat template makes it one); columns are the data set's. A function without **kwargs gets what it names. It
may be `async`. Several functions are summed by weight; None abstains.

Functions are called with one sample at a time, lists of length one: what a sample costs by hanging, crashing,
raising or giving anything but a number is its own reward and nobody else's. 128 samples of a trivial function
take some 10 ms this way. A function runs in a forked process: it cannot use CUDA, and what it keeps is lost.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from qerl.config import TaskConfig
from qerl.errors import UserError, near
from qerl.tasks.environment import Close, EnvironmentReply, EnvironmentWorker, Reset, Step, is_environment
from qerl.tasks.graders import BUILT_IN, NEED_ANSWER, Reward
from qerl.tasks.higher_lower import higher_lower
from qerl.tasks.scoring import RESERVED, Call, Failure, missing, name_of, score
from qerl.tasks.worker_pool import WorkerLost, WorkerPool
from qerl.types import Group, Prompt, Sample

REWARDS = {**BUILT_IN, "higher_lower": higher_lower}


class RewardPool:
    """Scores groups. Its processes start with it, before there is a model to fork, and end with `close()`."""

    def __init__(self, config: TaskConfig, functions: Sequence[Reward] = ()):
        """`functions`, if any, take the place of config.rewards."""
        needs_answer = not functions and any(
            name in (*NEED_ANSWER, "higher_lower") for name in config.rewards
        )
        self._answer_column = config.answer_column if needs_answer else None
        functions = list(functions) or [resolve(name, config) for name in config.rewards]
        weights = list(config.reward_weights) or [1.0] * len(functions)
        if len(weights) != len(functions):
            raise UserError(
                f"task.reward_weights must be one for each of {len(functions)} rewards, got {len(weights)}"
            )
        self._names = list(map(name_of, functions))
        pairs = list(zip(functions, weights, strict=True))
        for function in filter(inspect.isclass, functions):
            if not is_environment(function):
                has = "an environment has reset(row, seed) and step(completion)"
                raise UserError(f"task.rewards: {name_of(function)} is a class, but no environment: {has}")
        environments = [pair for pair in pairs if is_environment(pair[0])]
        if len(environments) > 1:
            named = ", ".join(name_of(function) for function, _ in environments)
            raise UserError(f"task.rewards: a sample can be of one environment, got {named}")
        self._functions = [function for function, _ in pairs if not is_environment(function)]
        weights = [weight for function, weight in pairs if not is_environment(function)]
        memory_bytes = int(config.reward_memory_gb * 1e9)
        self._stage, self._stage_crew = None, None
        for environment, self._environment_weight in environments:
            self._stage = EnvironmentWorker(
                environment, config.environment, deadline_s=config.reward_timeout_s
            )
            self._stage_crew = WorkerPool(self._stage.play, num_workers=1, memory_bytes=memory_bytes)
        self.failures: Counter[str] = Counter()
        """Samples without a reward since the last take_failures(), by cause."""
        self._examples: dict[str, str] = {}
        self._latest: Counter[str] = Counter()
        self._deadline_s = config.reward_timeout_s
        self._crew = None
        if self._functions:
            scored = functools.partial(score, self._functions, weights)
            self._crew = WorkerPool(scored, num_workers=config.reward_workers, memory_bytes=memory_bytes)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for crew in (self._crew, self._stage_crew):
            if crew is not None:
                crew.stop()

    def check(self, prompt: Prompt) -> None:
        """UserError if the functions ask for a column that the prompt, and so the data set, does not have."""
        there_are = f"there are: {', '.join(prompt.columns) or 'none beside the prompt'}"
        if self._answer_column is not None and self._answer_column not in prompt.columns:
            raise UserError(f"task.answer_column: no column {self._answer_column!r} ({there_are})")
        for function in self._functions:
            if names := missing(function, {*RESERVED, *prompt.columns}):
                asked = f"{name_of(function)} asks for {', '.join(names)}"
                raise UserError(f"task.rewards: {asked}; beside {', '.join(RESERVED)} {there_are}")

    @property
    def has_environment(self) -> bool:
        return self._stage is not None

    def play(self, calls: Sequence[Reset | Step | Close]) -> list[EnvironmentReply | Failure]:
        """The environments' replies, all calls at the same time."""
        assert self._stage is not None and self._stage_crew is not None
        if not calls:
            return []
        (replies,) = self._stage_crew.run([list(calls)], deadline_s=self._stage.patience_s(len(calls)))
        if isinstance(replies, WorkerLost):
            return [Failure(replies.cause, replies.message)] * len(calls)
        return replies

    def score(self, groups: list[Group]) -> list[list[float | None]]:
        """The reward of each sample of each group; UserError if not one sample could be given any."""
        rewards_P_G = self.attempt(groups)
        self.check_some(rewards_P_G)
        return rewards_P_G

    def attempt(self, groups: list[Group]) -> list[list[float | None]]:
        """The reward of each sample of each group, for as many as can be given any; with its environment's
        (sample.reward) in it."""
        for group in groups[:1]:
            self.check(group.prompt)
        calls = [
            _call(group.prompt, sample)
            for group in groups
            for sample in group.samples_G
            if sample.failure is None
        ]
        outcomes = iter(self._crew.run(calls, deadline_s=self._deadline_s) if self._crew else ())
        failures: Counter[str] = Counter()
        rewards_P_G = [
            [self._kept(self._whole(sample, outcomes), failures) for sample in group.samples_G]
            for group in groups
        ]
        self.failures += failures
        self._latest = failures
        return rewards_P_G

    def check_some(self, rewards_P_G: list[list[float | None]]) -> None:
        """UserError if there are samples, and not one has a reward: why, by the latest attempt."""
        rewards = [reward for rewards_G in rewards_P_G for reward in rewards_G]
        if not rewards or any(reward is not None for reward in rewards):
            return
        if not self._latest:
            names = ", ".join(self._names)
            raise UserError(f"task.rewards: {names} gave None for every sample of the step")
        cause, count = self._latest.most_common(1)[0]
        raise UserError(
            f"task.rewards: no sample of the step has a reward; {count} of {len(rewards)}: {cause}:"
            f" {self._examples[cause]}"
        )

    def _whole(
        self, sample: Sample, outcomes: Iterator[float | Failure | WorkerLost | None]
    ) -> float | Failure | WorkerLost | None:
        """What its environment and the functions gave it together; takes their outcome, if there is one."""
        if sample.failure is not None:
            return Failure(*sample.failure)
        outcome = next(outcomes) if self._crew else None
        if isinstance(outcome, Failure | WorkerLost) or not self.has_environment or sample.reward is None:
            return outcome
        return (outcome or 0.0) + self._environment_weight * sample.reward

    def _kept(self, outcome: float | Failure | WorkerLost | None, failures: Counter[str]) -> float | None:
        """The outcome if it is a reward; else it is counted, and its message kept as an example."""
        if not isinstance(outcome, Failure | WorkerLost):
            return outcome
        failures[outcome.cause] += 1
        self._examples[outcome.cause] = outcome.message
        return None

    def take_failures(self) -> dict[str, tuple[int, str]]:
        """{"over the deadline": (2, "not done after 10 s")}: count and an example by cause; starts anew."""
        taken = {cause: (count, self._examples[cause]) for cause, count in self.failures.items()}
        self.failures.clear()
        return taken


def format_failures(failures: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """A line for each cause of take_failures()."""
    for cause, (count, example) in failures.items():
        yield f"no reward for {count} samples: {cause}: {example}"


def _call(prompt: Prompt, sample: Sample) -> Call:
    if prompt.messages is None and sample.messages is None:
        return Call(prompt.text, sample.text, sample.tokens_T, prompt.columns)
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    completion = sample.messages or [{"role": "assistant", "content": sample.text}]
    return Call(messages, completion, sample.tokens_T, prompt.columns)


def resolve(name: str, config: TaskConfig) -> Reward:
    """The function that an entry of task.rewards names."""
    if name in REWARDS:
        return REWARDS[name](config)
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise UserError(
            f"task.rewards: {name!r} is neither module:function nor file.py:function,"
            f" nor one of {', '.join(REWARDS)}{near(name, REWARDS)}"
        )
    try:
        module = _file_module(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # the user's code runs here: anything may come
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"task.rewards {name}: cannot import {place}: {reason}") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise UserError(f"task.rewards {name}: {place} has no {attribute!r}{near(attribute, vars(module))}")
    if not callable(function):
        raise UserError(f"task.rewards {name}: {attribute} is a {type(function).__name__}, not a function")
    return function


def _file_module(path: Path) -> ModuleType:
    name = f"qerl_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, among others, look their module up
    spec.loader.exec_module(module)
    return module
