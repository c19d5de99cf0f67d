"""Run multi-turn environments in a worker process.

    async def reset(row, seed)     -> messages after the prompt, before the policy's first turn
    async def step(completion)     -> (messages, reward or None, True if the episode is over)

Each sample has its own environment object. `row` contains the columns and `prompt`. Messages are a string
(a user message) or a list of {"role", "content"}; the rewards of all steps are added. The functions need not
be async; `seed`, `close()` and `score(messages)` are optional: the latter is called once, when the
sample has ended, and its number is added. The seed is a function of (seed, step, prompt): all samples of a
prompt get the same episode, so their rewards are comparable, and so does a resumed run.

All environments of a run share one forked process and one event loop, so thousands can wait at once. Each
call has a deadline. Time in which other code blocks the loop does not count. Code that blocks the loop until
its deadline is interrupted by a signal; if that fails, the process is killed, and all unfinished samples
fail.
"""

import asyncio
import dataclasses
import inspect
import math
import signal
import time
from collections.abc import Callable, Generator
from types import coroutine
from typing import Any

from qerl.config import EnvironmentConfig
from qerl.tasks.row_values import is_unicode
from qerl.tasks.scoring import Failure, awaited, failure_of, finite_number, name_of

Key = tuple[int, int]
Messages = list[dict[str, str]]
_MIN_BLOCKED_S = 0.01  # the deadlines of other calls are extended if code blocks the loop for longer


@dataclasses.dataclass(frozen=True, slots=True)
class Reset:
    key: Key
    row: dict[str, Any]
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    key: Key
    completion: str


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    key: Key
    messages: Messages


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    key: Key


Call = Reset | Step | Score | Close


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """EnvironmentReply([{"role": "user", "content": "higher"}], 0.0, False)"""

    messages: Messages
    reward: float | None = None
    is_done: bool = False


class _InvalidReturn(Exception):
    """The user's code returned something invalid: (cause, message)."""


class _Blocked(BaseException):
    """Raised inside code that blocks the loop. Not an Exception, so that the code does not catch it."""


def is_environment(function: Any) -> bool:
    return all(callable(getattr(function, name, None)) for name in ("reset", "step"))


class EnvironmentWorker:
    """Owns the environments of unfinished samples. Call it in the process that owns them."""

    def __init__(self, make: Callable[[], Any], config: EnvironmentConfig, *, deadline_s: float):
        self._make, self._config, self._deadline_s = make, config, deadline_s
        self._live: dict[Key, Any] = {}
        self._clocks: set[asyncio.Timeout] = set()
        self._runner: asyncio.Runner | None = None

    def max_play_s(self, num_calls: int) -> float:
        """Return the most time that so many calls can take unless code blocks."""
        return (2 + math.ceil(num_calls / self._config.max_concurrent)) * self._deadline_s

    def play(self, calls: list[Call]) -> list[EnvironmentReply | Failure]:
        """Return the reply to each call. After a failure, only close the environment."""
        if self._runner is None:
            signal.signal(signal.SIGALRM, _interrupt)
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(self._all(calls))
        except BaseException as error:  # from a task that the user's code left behind: the loop is closed
            self._runner, self._live = None, {}
            return [failure_of(name_of(self._make), error)] * len(calls)

    async def _all(self, calls: list[Call]) -> list[EnvironmentReply | Failure]:
        gate = asyncio.Semaphore(self._config.max_concurrent)
        return await asyncio.gather(*(self._one(call, gate) for call in calls))

    async def _one(self, call: Call, gate: asyncio.Semaphore) -> EnvironmentReply | Failure:
        name = f"{name_of(self._make)}.{type(call).__name__.lower()}"
        async with gate:
            clock = asyncio.timeout(self._deadline_s)
            try:
                async with clock:
                    self._clocks.add(clock)
                    return await self._run_with_alarm(self._reply(call), clock)
            except BaseException as error:  # SystemExit too: it fails the sample and must not end the process
                if clock.expired() or isinstance(error, _Blocked):
                    return Failure("over the deadline", f"{name}: not done after {self._deadline_s:g} s")
                if isinstance(error, _InvalidReturn):
                    return Failure(error.args[0], f"{name}: {error.args[1]}")
                return failure_of(name, error)
            finally:
                self._clocks.discard(clock)

    @coroutine
    def _run_with_alarm(self, code: Any, clock: asyncio.Timeout) -> Generator[Any, Any, EnvironmentReply]:
        """Run the code from one await to the next, each part under its own alarm."""
        value, error = None, None
        while True:
            begin_s = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._deadline_s)
            try:
                awaited = code.send(value) if error is None else code.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                self._extend_deadlines(time.monotonic() - begin_s, clock)
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as caught:  # pass a cancellation to the code
                error = caught

    def _extend_deadlines(self, blocked_s: float, clock: asyncio.Timeout) -> None:
        for other in self._clocks if blocked_s > _MIN_BLOCKED_S else ():
            when_s = other.when()
            if other is not clock and when_s is not None and not other.expired():
                other.reschedule(when_s + blocked_s)

    async def _reply(self, call: Call) -> EnvironmentReply:
        if isinstance(call, Reset):
            environment = self._live[call.key] = self._make()
            takes_seed = "seed" in inspect.signature(environment.reset).parameters
            options = {"seed": call.seed} if takes_seed else {}
            return EnvironmentReply(_messages(await awaited(environment.reset(call.row, **options))))
        if isinstance(call, Close):
            environment = self._live.pop(call.key, None)
            await awaited(environment.close() if hasattr(environment, "close") else None)
            return EnvironmentReply([])
        if isinstance(call, Score):
            value = await awaited(self._live[call.key].score(call.messages))
            return EnvironmentReply([], _number(value), True)
        if call.key not in self._live:
            raise _InvalidReturn("died", "the process that ran it has ended")
        result = await awaited(self._live[call.key].step(call.completion))
        if not isinstance(result, tuple) or len(result) != 3:
            kind = type(result).__name__
            raise _InvalidReturn("wrong length", f"returned a {kind}, not (messages, reward, is_done)")
        return EnvironmentReply(_messages(result[0]), _number(result[1]), bool(result[2]))


def _interrupt(signum: int, frame: Any) -> None:
    raise _Blocked


def _messages(content: Any) -> Messages:
    if content is None:
        return []
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    try:
        messages = [{"role": message["role"], "content": message["content"]} for message in content]
    except (TypeError, KeyError) as error:
        message = "returned neither a string nor messages with role and content"
        raise _InvalidReturn("not messages", message) from error
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise _InvalidReturn("not messages", "returned a message whose role or content is not a string")
    if not all(is_unicode(text) for message in messages for text in message.values()):
        raise _InvalidReturn("not messages", "returned a message that is not valid Unicode")
    # Plain strings: a subclass of str may be one that the parent process cannot unpickle.
    return [{key: "".join(text) for key, text in message.items()} for message in messages]


def _number(reward: Any) -> float | None:
    number = None if reward is None else finite_number("step", reward)
    if isinstance(number, Failure):
        raise _InvalidReturn(number.cause, number.message)
    return number
