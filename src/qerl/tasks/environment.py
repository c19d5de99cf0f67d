"""Run multi-turn environments in a worker process.

    async def reset(row, seed)     -> messages after the prompt, before the policy's first turn
    async def step(completion)     -> (messages, reward or None, True if the episode is over)

Each sample has its own environment object. `row` contains the columns and `prompt`. Messages are a string
(a user message) or a list of {"role", "content"}; the rewards of all steps are added. The functions need not
be async; `seed`, `close()` and `score(messages)` are optional: the latter is called once, when the
sample has ended, and its number is added. The seed is a function of (seed, step, prompt): all samples of a
prompt get the same episode, so their rewards are comparable, and so does a resumed run.

Where there are several classes, the column `environment` of a row names its own (`by_row`).

All environments of a run share one forked process and one event loop, so thousands can wait at once. Each
call has a deadline. Time in which other code blocks the loop does not count. Code that blocks the loop until
its deadline is interrupted by a signal; if that fails, the process is killed, and all unfinished samples
fail.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from qerl.config import EnvironmentConfig
from qerl.errors import require
from qerl.tasks.event_loop import GuardedLoop, InvalidReturn
from qerl.tasks.rows.values import is_unicode
from qerl.tasks.scoring import NOT_SUPPORTED, Failure, awaited, failure_of, finite_number, name_of

_IS_ERROR = re.compile(r"\W*(an )?error\b", re.IGNORECASE)

Key = tuple[int, int]
Messages = list[dict[str, str]]


class Call(NamedTuple):
    """content: reset's row, step's completion, score's messages; seed: of reset."""

    name: Literal["reset", "step", "score", "close"]
    key: Key
    content: Any = None
    seed: int = 0


def says_error(result: str) -> bool:
    """Return True if a tool's result says that it is an error: it begins with the word."""
    return _IS_ERROR.match(result) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """EnvironmentReply([{"role": "user", "content": "higher"}], 0.0, False)"""

    messages: Messages
    reward: float | None = None
    is_done: bool = False


def is_environment(function: Any) -> bool:
    return all(callable(getattr(function, name, None)) for name in ("reset", "step"))


COLUMN = "environment"
"""The column that names a row's environment, if there are several."""


class RowEnvironment:
    """The environment that the row names; `by_row` derives the class of a run."""

    kinds: ClassVar[dict[str, tuple[Callable[[], Any], float]]] = {}
    """Classes and weights by name."""

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        name = row.get(COLUMN)
        if name not in self.kinds:
            there_are = f"there are: {', '.join(self.kinds)}"
            raise InvalidReturn(NOT_SUPPORTED, f"a row's {COLUMN} is {name!r}; {there_are}")
        kind, self._weight = self.kinds[name]
        self._environment = kind()
        return await awaited(self._environment.reset(row, **_seed_option(self._environment, seed)))

    async def step(self, completion: str) -> Any:
        result = await awaited(self._environment.step(completion))
        is_whole = isinstance(result, tuple) and len(result) == 3
        return (result[0], self._weighted(result[1]), result[2]) if is_whole else result

    async def score(self, messages: Messages) -> Any:
        score = getattr(self._environment, "score", None)
        return None if score is None else self._weighted(await awaited(score(messages)))

    async def close(self) -> None:
        close = getattr(getattr(self, "_environment", None), "close", None)
        await awaited(None if close is None else close())

    def _weighted(self, value: Any) -> Any:
        number = _number(value)
        return None if number is None else self._weight * number


def by_row(kinds: dict[str, tuple[Any, float]]) -> type[RowEnvironment]:
    """Return an environment that is, for each row, the one that its column names."""
    classes = [kind for kind, _ in kinds.values()]
    extends = {bool(getattr(kind, "extends_prompt", False)) for kind in classes}
    require(len(extends) == 1, f"task.rewards: of {', '.join(kinds)} only some continue the prompt's message")
    attributes: dict[str, Any] = {"kinds": kinds, "extends_prompt": extends.pop()}
    attributes["deterministic"] = all(getattr(kind, "deterministic", False) for kind in classes)
    if not any(callable(getattr(kind, "score", None)) for kind in classes):
        attributes["score"] = None
    return type(", ".join(kinds), (RowEnvironment,), attributes)


def _seed_option(environment: Any, seed: int) -> dict[str, int]:
    return {"seed": seed} if "seed" in inspect.signature(environment.reset).parameters else {}


class EnvironmentWorker:
    """Owns the environments of unfinished samples. Call it in the process that owns them."""

    def __init__(self, make: Callable[[], Any], config: EnvironmentConfig, *, deadline_s: float):
        self._make, self._config, self._deadline_s = make, config, deadline_s
        self._live: dict[Key, Any] = {}
        self._loop = GuardedLoop[EnvironmentReply](
            max_concurrent=config.max_concurrent, deadline_s=deadline_s
        )

    def max_play_s(self, num_calls: int) -> float:
        """Return the longest time that this many calls can take unless code blocks."""
        return (2 + math.ceil(num_calls / self._config.max_concurrent)) * self._deadline_s

    def play(self, calls: list[Call]) -> list[EnvironmentReply | Failure]:
        """Return the reply to each call. After a failure, only close the environment."""
        name = name_of(self._make)
        replies = self._loop.run([(f"{name}.{call.name}", partial(self._reply, call)) for call in calls])
        if isinstance(replies, BaseException):
            self._live = {}
            return [failure_of(name, replies)] * len(calls)
        return replies

    async def _reply(self, call: Call) -> EnvironmentReply:
        if call.name == "reset":
            environment = self._live[call.key] = self._make()
            options = _seed_option(environment, call.seed)
            return EnvironmentReply(_messages(await awaited(environment.reset(call.content, **options))))
        if call.name == "close":
            environment = self._live.pop(call.key, None)
            await awaited(environment.close() if hasattr(environment, "close") else None)
            return EnvironmentReply([])
        if call.name == "score":
            value = await awaited(self._live[call.key].score(call.content))
            return EnvironmentReply([], _number(value), True)
        if call.key not in self._live:
            raise InvalidReturn("died", "the process that ran it has ended")
        result = await awaited(self._live[call.key].step(call.content))
        if not isinstance(result, tuple) or len(result) != 3:
            kind = type(result).__name__
            raise InvalidReturn("wrong length", f"returned a {kind}, not (messages, reward, is_done)")
        return EnvironmentReply(_messages(result[0]), _number(result[1]), bool(result[2]))


def _messages(content: Any) -> Messages:
    if content is None:
        return []
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    try:
        messages = [{"role": message["role"], "content": message["content"]} for message in content]
    except (TypeError, KeyError) as error:
        message = "returned neither a string nor messages with role and content"
        raise InvalidReturn("not messages", message) from error
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise InvalidReturn("not messages", "returned a message whose role or content is not a string")
    if not all(is_unicode(text) for message in messages for text in message.values()):
        raise InvalidReturn("not messages", "returned a message that is not valid Unicode")
    # Plain strings: a subclass of str may be one that the parent process cannot unpickle.
    return [{key: "".join(text) for key, text in message.items()} for message in messages]


def _number(reward: Any) -> float | None:
    number = None if reward is None else finite_number("step", reward)
    if isinstance(number, Failure):
        raise InvalidReturn(number.cause, number.message)
    return number
