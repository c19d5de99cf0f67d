"""Score a step's samples with reward functions in TRL's form, run in processes that can be killed.

    f(prompts, completions, completion_ids, **columns) -> list[float | None]
    a class with reset and step: an environment (environment.py); its episode is the sample

prompts and completions are strings, or lists of messages if the prompt is a conversation (with a chat
template it is one); columns are the data set's. A function without **kwargs gets the arguments that it names.
It may be `async`. The values of several functions are summed by weight; None abstains.

Functions are called with one sample at a time, as lists of length one, unless they ask for a group or a batch
(reward_calls.py): a sample that makes a function hang, crash, raise or return no number loses its own reward
only. 128 samples of a trivial function take about 10 ms. A function runs in a forked process: it cannot use
CUDA, and changes to its state are lost.
"""

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import UserError, did_you_mean, did_you_mean_file, printable, quantity, require
from qerl.tasks.call_match import calls
from qerl.tasks.environment import COLUMN, Call, EnvironmentReply, EnvironmentWorker, by_row, is_environment
from qerl.tasks.graders import BUILT_IN, NEED_ANSWER, Reward
from qerl.tasks.group_rewards import GROUP_REWARDS
from qerl.tasks.higher_lower import higher_lower
from qerl.tasks.judges.judge import Judge
from qerl.tasks.judges.own_judge import BASE, OwnJudge
from qerl.tasks.memory_limit import stack_bytes
from qerl.tasks.reward_calls import FunctionScores, RewardFunctions
from qerl.tasks.reward_means import RewardTally, Sums, reward_means
from qerl.tasks.reward_model import RewardModel
from qerl.tasks.scoring import (
    NOT_SUPPORTED,
    RESERVED,
    Arguments,
    Failure,
    Outcome,
    Parts,
    check_reward_columns,
    finite_number,
    missing_arguments,
    name_of,
    reward_arguments,
    total,
)
from qerl.tasks.sources import function_sources
from qerl.tasks.worker_pool import WorkerPool
from qerl.types import Group, Prompt, Sample

REWARDS: dict[str, Callable[[TaskConfig], Any]] = {
    **BUILT_IN,
    **GROUP_REWARDS,
    "calls": calls,
    "judge": lambda config: (OwnJudge if config.judge.url == BASE else Judge)(config),
    "reward_model": RewardModel,
    "higher_lower": higher_lower,
}
_GRADED = frozenset({"judge", "reward_model", *GROUP_REWARDS})  # 1 is not a correct sample
RewardsPG = list[list[float | None]]


class RewardPool:
    """Scores groups in processes that start with it, before a model is loaded, and end with `close()`."""

    def __init__(
        self, config: TaskConfig, functions: Sequence[Reward] = (), *, agent: Callable[..., Any] | None = None
    ):
        """functions: used instead of config.rewards if there are any. agent: what has given the samples their
        rewards; there is then no function."""
        self._agent, has_own = agent, bool(functions) or agent is not None
        needs_answer = not has_own and not {*NEED_ANSWER, "higher_lower"}.isdisjoint(config.rewards)
        self._answer_column = config.answer_column if needs_answer else None
        self.is_built_in = not has_own and all(
            name in REWARDS and name not in _GRADED for name in config.rewards or ("",)
        )
        """True if there is a reward and none is the user's own or a model's: 1 means a correct sample."""
        entries = [] if agent else list(functions) or list(config.rewards)
        functions = [resolve(each, config) if isinstance(each, str) else each for each in entries]
        named = functions if agent is None else [agent]
        self.sources, self._unknown_state = function_sources(named)
        """SHA-256 of what each function is made of, by name; none for built-in ones."""
        weights = list(config.reward_weights if agent is None else ()) or [1.0] * len(functions)
        if len(weights) != len(functions):
            needed = f"a weight for each of {len(functions)} rewards"
            raise UserError(f"task.reward_weights needs {needed}, got {len(weights)}")
        self._names, self.has_rewards = list(map(name_of, named)), bool(named)
        """has_rewards: False only in distillation without a reward: samples then have none."""
        pairs = list(zip(functions, weights, strict=True))
        made = _environment(pairs)
        self.environments: tuple[str, ...] = tuple(getattr(made, "kinds", ()))
        """Names of several environments, of which each row names its own."""
        self.environment = next((e for e, f in zip(entries, functions, strict=True) if f is made), made)
        """The environment's class, or its entry in config.rewards; None without one."""
        self.scores_episodes = callable(getattr(made, "score", None))
        self.extends_prompt = bool(getattr(made, "extends_prompt", False))
        self.is_deterministic = bool(getattr(made, "deterministic", False))
        self._models = [(each, weight) for each, weight in pairs if isinstance(each, RewardModel | OwnJudge)]
        pairs = [pair for pair in pairs if not isinstance(pair[0], RewardModel | OwnJudge)]
        of_user = [f for entry, f in zip(entries, functions, strict=True) if not _is_built_in(entry)]
        self._episode_weight: float = next((weight for each, weight in pairs if each is made), 1.0)
        pairs = [pair for pair in pairs if not is_environment(pair[0])]
        self._functions = RewardFunctions(pairs, of_user, config)
        self._tally = RewardTally(
            [*map(name_of, self._functions.functions), *(name_of(each) for each, _ in self._models)]
        )
        self.counts = Counter[str]()
        """Calls of rewards for a group or a batch that failed."""
        self._environment_worker, self._environment_pool = _started(made, config)
        self.failures, self._latest = Counter[str](), Counter[str]()
        """Samples without a reward since the last take_failures(), by cause; those of the latest call."""
        self._examples: dict[str, str] = {}

    @property
    def notices(self) -> list[str]:
        """Lines for the log: which sandbox the reward code uses, and state of which no hash can be made."""
        notices = (getattr(function, "notice", None) for function in self._functions.functions)
        unknown = ", ".join(self._unknown_state[:5]) + ", ..." * (len(self._unknown_state) > 5)
        state = f"a resumed run cannot tell whether these of the reward have changed: {unknown}"
        return [*(text for text in notices if isinstance(text, str)), *([state] if unknown else [])]

    def rank_notices(self, num_ranks: int) -> list[str]:
        """Return a line if functions that are called for a batch see one rank's samples only."""
        names = self._functions.of_batch if num_ranks > 1 else []
        share = f"a call for a batch has the samples of one of {num_ranks} ranks, not all of the step"
        return [f"{', '.join(names)}: {share}"] if names else []

    @property
    def own_judges(self) -> list[OwnJudge]:
        """Rewards that the run's own model gives."""
        return [each for each, _ in self._models if isinstance(each, OwnJudge)]

    def reads_answer(self, column: str) -> bool:
        """True if a built-in reward compares with this column, or a function of the user's names it."""
        named = any(column in missing_arguments(function, ()) for function in self._functions.functions)
        return self._answer_column is not None or named

    def success_threshold(self, threshold: float | None) -> float | None:
        """Return evaluate.success_threshold; where it is not given, that of built-in rewards."""
        return 1.0 if threshold is None and self.is_built_in else threshold

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._functions.stop()
        if self._environment_pool is not None:
            self._environment_pool.stop()

    def check(self, prompt: Prompt) -> None:
        """Raise UserError if the functions need a column that the prompt, and so the data set, lacks."""
        needs = f"no column {COLUMN} that names one of {', '.join(self.environments)}"
        require(not self.environments or COLUMN in prompt.columns, f"task.rewards: the data has {needs}")
        known = {*RESERVED, *prompt.columns}
        missing = ((name_of(each), missing_arguments(each, known)) for each in self._functions.functions)
        check_reward_columns(prompt.columns, self._answer_column, missing)

    def play(self, calls: Sequence[Call]) -> list[EnvironmentReply | Failure]:
        """Run all environment calls concurrently and return their replies."""
        assert self._environment_worker is not None and self._environment_pool is not None
        if not calls:
            return []
        deadline_s = self._environment_worker.max_play_s(len(calls))
        (replies,) = self._environment_pool.run([list(calls)], deadline_s=deadline_s)
        return [replies] * len(calls) if isinstance(replies, Failure) else replies

    def score(self, groups: list[Group]) -> list[list[float | None]]:
        """Return the reward of each sample of each group; raise UserError if no sample has one."""
        rewards_P_G = self.attempt(groups)
        self.check_some(rewards_P_G)
        return rewards_P_G

    def attempt(self, groups: list[Group]) -> list[list[float | None]]:
        """Return the reward of each sample of each group, None where it failed. It includes the environment's
        reward (sample.reward)."""
        return self.begin().rewards(list(enumerate(groups)))

    def begin(self) -> "Scoring":
        """Return a Scoring, to which groups are given as they end."""
        return Scoring(self, self._functions.begin(self.counts))

    def total(
        self, groups: list[Group], calls_P_G: list[list[Arguments]], parts_P_G: list[list[Parts]]
    ) -> RewardsPG:
        """Return the groups' rewards by the functions' values and what else there is to add, and count the
        failures. calls_P_G and parts_P_G: of the samples that have not failed before."""
        parts_S = [parts for parts_G in parts_P_G for parts in parts_G]
        for parts in parts_S:
            for index, value in {} if isinstance(parts, Failure) else parts.items():
                self._tally.add(index, [value])
        outcomes_S = [total(parts, self._functions.weights) for parts in parts_S]
        for i, (model, weight) in enumerate(self._models, start=len(self._functions.functions)):
            values_S = [value for values_G in model.score_groups(calls_P_G) for value in values_G]
            self._tally.add(i, values_S)
            pairs = zip(outcomes_S, values_S, strict=True)
            outcomes_S = [_added(outcome, weight, value) for outcome, value in pairs]
        outcomes = iter(outcomes_S)
        failures: Counter[str] = Counter()
        rewards_P_G = [
            [self._count(self._total(sample, outcomes), failures) for sample in group.samples_G]
            for group in groups
        ]
        self.failures += failures
        self._latest = failures
        return rewards_P_G

    def check_some(self, rewards_P_G: list[list[float | None]]) -> None:
        """Raise UserError with the most common cause if there are samples and none has a reward."""
        rewards = [reward for rewards_G in rewards_P_G for reward in rewards_G]
        if not self.has_rewards or not rewards or any(reward is not None for reward in rewards):
            return
        if not self._latest:
            names = ", ".join(self._names)
            raise UserError(f"task.rewards: {names} returned None for every sample of the step")
        cause, count = self._latest.most_common(1)[0]
        raise UserError(
            f"task.rewards: no sample of the step has a reward; {count} of {len(rewards)} failed: {cause}:"
            f" {self._examples[cause]}"
        )

    def _total(self, sample: Sample, outcomes: Iterator[Outcome]) -> Outcome:
        """Add the environment's or the agent's reward to the functions' outcome, taken from the iterator."""
        if sample.failure is not None:
            return Failure(*sample.failure)
        outcome = next(outcomes)
        has_own = self.environment is not None or self._agent is not None
        added = sample.reward if has_own else None
        return outcome if added is None else _added(outcome, self._episode_weight, added)

    def _count(self, outcome: Outcome, failures: Counter[str]) -> float | None:
        """Return a reward as it is. Count a failure by cause, with its message as an example."""
        if not isinstance(outcome, Failure):
            return outcome
        require(outcome.cause != NOT_SUPPORTED, f"task.rewards: {outcome.message}")
        failures[outcome.cause] += 1
        self._examples[outcome.cause] = outcome.message
        return None

    def take_failures(self) -> dict[str, tuple[int, str]]:
        """Return and reset {"over the deadline": (2, "not done after 10 s")}: count and example by cause."""
        taken = {cause: (count, self._examples[cause]) for cause, count in self.failures.items()}
        self.failures.clear()
        return taken

    def take_sums(self) -> Sums:
        """Return and reset the sum of each reward's values, before its weight, and their number."""
        return self._tally.take()

    def take_counts(self) -> Counter[str]:
        """Return and reset the counts of failed calls for a group or a batch."""
        taken = Counter(self.counts)
        self.counts.clear()
        return taken

    def take_means(self) -> dict[str, float]:
        """Return and reset the metric rewards/NAME/mean of each of several rewards, and the counts."""
        return reward_means([self.take_sums()]) | dict(self.take_counts())


class Scoring:
    """Rewards of groups that end one after the other: the functions run while others are sampled.

    The rewards and failures are those of `RewardPool.attempt`. Reward models run at the end, for all samples
    together: a batch of others may round differently.
    """

    def __init__(self, pool: RewardPool, scores: FunctionScores | None):
        """scores: None without reward functions."""
        self._pool, self._scores = pool, scores
        self._calls: dict[int, list[Arguments]] = {}

    @property
    def busy_s(self) -> float:
        """Seconds in which functions ran before `rewards` was called, to the time between two polls."""
        return 0.0 if self._scores is None else self._scores.busy_s

    def add(self, key: int, group: Group) -> None:
        """Begin to score a group, which `rewards` gets under the same key; raise UserError as `attempt`."""
        if not self._calls:
            self._pool.check(group.prompt)
        calls = [_call(group.prompt, sample) for sample in group.samples_G if sample.failure is None]
        self._calls[key] = calls
        if self._scores is not None:
            self._scores.add(key, calls)

    def poll(self) -> None:
        """Keep the workers busy; does not wait for them."""
        if self._scores is not None:
            self._scores.poll()

    def rewards(self, keyed_P: list[tuple[int, Group]]) -> RewardsPG:
        """Return the reward of each sample of each group, those added before and others."""
        for key, group in keyed_P:
            if key not in self._calls:
                self.add(key, group)
        keys = [key for key, _ in keyed_P]
        calls_P_G = [self._calls[key] for key in keys]
        if self._scores is None:
            parts_P_G: list[list[Parts]] = [[{} for _ in calls_G] for calls_G in calls_P_G]
        else:
            parts_P_G = self._scores.parts(keys)
        return self._pool.total([group for _, group in keyed_P], calls_P_G, parts_P_G)


def _is_built_in(entry: Any) -> bool:
    return isinstance(entry, str) and entry in REWARDS


def _environment(pairs: Sequence[tuple[Reward, float]]) -> Reward | None:
    """Return the environment among the functions and their weights, if there is one; of several, one that is
    that of the row."""
    for function in (function for function, _ in pairs if inspect.isclass(function)):
        if not is_environment(function):
            raise UserError(
                f"task.rewards: {name_of(function)} is a class, but not an environment:"
                " an environment has reset(row, seed) and step(completion)"
            )
    kinds = {name_of(each): (each, weight) for each, weight in pairs if is_environment(each)}
    names = Counter(name_of(each) for each, _ in pairs if is_environment(each))
    if twice := [name for name, count in names.items() if count > 1]:
        raise UserError(
            f"task.rewards: two environments are named {twice[0]}, which a row could not tell apart:"
            " rename one of them"
        )
    if len(kinds) > 1:
        return by_row(kinds)
    return next((each for each, _ in kinds.values()), None)


def _started(
    environment: Reward | None, config: TaskConfig
) -> tuple[EnvironmentWorker, WorkerPool] | tuple[None, None]:
    """Start the process of the environment, if there is one."""
    if environment is None:
        return None, None
    worker = EnvironmentWorker(environment, config.environment, deadline_s=config.reward_timeout_s)
    memory_bytes = int(config.reward_memory_gb * 1e9) + stack_bytes(config.environment.max_concurrent)
    return worker, WorkerPool(worker.play, num_workers=1, memory_bytes=memory_bytes)


def _added(outcome: Outcome, weight: float, value: float | Failure) -> Outcome:
    """Add another value to the outcome; a failure of either is the sample's."""
    if isinstance(outcome, Failure):
        return outcome
    if isinstance(value, Failure):
        return value
    return finite_number("the weighted sum", (outcome or 0.0) + weight * value)


def format_failures(failures: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """Yield a line for each cause of take_failures()."""
    for cause, (count, example) in failures.items():
        yield printable(f"no reward for {quantity(count, 'sample')}: {cause}: {example}")


def _call(prompt: Prompt, sample: Sample) -> Arguments:
    if prompt.messages is None and sample.messages is None:
        return reward_arguments(prompt.text, sample.text, sample.tokens_T, prompt.columns)
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    completion = sample.messages or [{"role": "assistant", "content": sample.text}]
    return reward_arguments(messages, completion, sample.tokens_T, prompt.columns)


def resolve(name: str, config: TaskConfig) -> Reward:
    """Return the function that an entry of task.rewards names."""
    return REWARDS[name](config) if name in REWARDS else imported(name, "task.rewards")


def check_names_function(name: str, field: str) -> None:
    """Raise UserError if the value of this field, which is no built-in reward, has no place:function."""
    if ":" in name:
        return
    if name.endswith(".py"):
        raise UserError(f"{field} {name}: name its function too, as {name}:FUNCTION")
    built_in = f", nor one of {', '.join(REWARDS)}{did_you_mean(name, REWARDS)}"
    is_reward = field == "task.rewards"
    raise UserError(
        f"{field}: {name!r} is neither module:function nor file.py:function{built_in if is_reward else ''}"
    )


def imported(name: str, field: str) -> Callable[..., Any]:
    """Return the function or class that module:name or file.py:name, the value of this field, stands for."""
    check_names_function(name, field)
    module_name, _, attribute = name.rpartition(":")
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        raise UserError(f"{field} {name}: no such file{did_you_mean_file(Path(module_name))}")
    folder = str(Path(module_name).parent.absolute() if is_file else Path.cwd())
    if folder not in sys.path:  # as Python has it for a script, but last: it hides nothing that is installed
        sys.path.append(folder)
    try:
        module = _file_module(module_name) if is_file else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # runs the user's code
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(f"{field} {name}: cannot import {module_name}: {reason}") from error
    function = getattr(module, attribute, None)
    if function is None:
        hint = did_you_mean(attribute, vars(module))
        raise UserError(f"{field} {name}: {module_name} has no {attribute!r}{hint}")
    if not callable(function):
        raise UserError(f"{field} {name}: {attribute} is of type {type(function).__name__}, not a function")
    return function


def with_absolute_path(name: str) -> str:
    """Return FILE.py:NAME with the file's absolute path, and other names unchanged."""
    file, colon, attribute = name.rpartition(":")
    return f"{Path(file).absolute()}:{attribute}" if colon and file.endswith(".py") else name


class _UncachedLoader(importlib.machinery.SourceFileLoader):
    """Compiles the file itself: Python takes a .pyc for its own if second and size of the last edit agree."""

    def path_stats(self, path: str) -> dict[str, Any]:
        raise OSError  # as of a source without a time: no .pyc is read or written


def _file_module(path: str) -> ModuleType:
    name = f"qerl_reward_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_UncachedLoader(name, path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, for example, look up their module
    spec.loader.exec_module(module)
    return module
