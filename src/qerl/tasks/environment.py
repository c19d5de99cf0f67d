"""Environments: what a policy talks with for several turns, and the process in which their code runs.

    async def reset(row, seed)     -> what is said after the prompt, before the policy's first turn
    async def step(completion)     -> (what is said, reward or None, whether the episode is over)

There is one object for each sample. `row` holds the columns and `prompt`. Messages are a text (the user's) or
a list of {"role", "content"}; the rewards of all steps are added up. The functions may be plain ones; `seed`
and a `close()` may be left out. The seed is a function of (seed, step, prompt): the samples of a prompt meet
the same world, so their rewards compare, and a run that is resumed meets it again.

All environments of a run live in one forked process, in one event loop, so that thousands may wait for
something at once. A call has a deadline. Time in which another one's code blocks the loop is not counted, and
code that blocks it by itself until its deadline is interrupted by a signal; what even that does not stop is
ended with the process, and every sample under way with it.
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
from qerl.tasks.scoring import Failure, failure_of, finite_number, name_of

Key = tuple[int, int]
Messages = list[dict[str, str]]
_NOTICED_S = 0.01  # a slice of code that blocks the others for longer is given back to their clocks


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
class Close:
    key: Key


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """Reply([{"role": "user", "content": "higher"}], 0.0, False)"""

    messages: Messages
    reward: float | None = None
    is_done: bool = False


class _Unfit(Exception):
    """What the user's code gave is not what it should give: (cause, message)."""


class _Blocked(BaseException):
    """Raised inside code that keeps the loop to itself; no Exception, lest it be caught there."""


def is_environment(function: Any) -> bool:
    return all(callable(getattr(function, name, None)) for name in ("reset", "step"))


class EnvironmentWorker:
    """The environments under way; to be called in the process where they live."""

    def __init__(self, make: Callable[[], Any], config: EnvironmentConfig, *, deadline_s: float):
        self._make, self._config, self._deadline_s = make, config, deadline_s
        self._live: dict[Key, Any] = {}
        self._clocks: set[asyncio.Timeout] = set()
        self._runner: asyncio.Runner | None = None

    def patience_s(self, num_calls: int) -> float:
        """What so many calls can take at most, unless code blocks."""
        return (2 + math.ceil(num_calls / self._config.max_concurrent)) * self._deadline_s

    def play(self, calls: list[Reset | Step | Close]) -> list[EnvironmentReply | Failure]:
        """The reply to each call. One that has failed should be closed, and asked nothing else."""
        if self._runner is None:
            signal.signal(signal.SIGALRM, _interrupt)
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(self._all(calls))
        except BaseException as error:  # of a task that the user's code left behind: the loop is no more
            self._runner, self._live = None, {}
            return [failure_of(name_of(self._make), error)] * len(calls)

    async def _all(self, calls: list[Reset | Step | Close]) -> list[EnvironmentReply | Failure]:
        gate = asyncio.Semaphore(self._config.max_concurrent)
        return await asyncio.gather(*(self._one(call, gate) for call in calls))

    async def _one(self, call: Reset | Step | Close, gate: asyncio.Semaphore) -> EnvironmentReply | Failure:
        name = f"{name_of(self._make)}.{type(call).__name__.lower()}"
        async with gate:
            clock = asyncio.timeout(self._deadline_s)
            try:
                async with clock:
                    self._clocks.add(clock)
                    return await self._sliced(self._reply(call), clock)
            except (
                BaseException
            ) as error:  # SystemExit too: it is the sample's failure, not the process's end
                if clock.expired() or isinstance(error, _Blocked):
                    return Failure("over the deadline", f"{name}: not done after {self._deadline_s:g} s")
                if isinstance(error, _Unfit):
                    return Failure(error.args[0], f"{name}: {error.args[1]}")
                return failure_of(name, error)
            finally:
                self._clocks.discard(clock)

    @coroutine
    def _sliced(self, code: Any, clock: asyncio.Timeout) -> Generator[Any, Any, EnvironmentReply]:
        """Runs it from one await to the next, each slice under an alarm of its own."""
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
                self._give_back(time.monotonic() - begin_s, clock)
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as caught:  # a cancellation is the code's own to see
                error = caught

    def _give_back(self, blocked_s: float, clock: asyncio.Timeout) -> None:
        for other in self._clocks if blocked_s > _NOTICED_S else ():
            when_s = other.when()
            if other is not clock and when_s is not None and not other.expired():
                other.reschedule(when_s + blocked_s)

    async def _reply(self, call: Reset | Step | Close) -> EnvironmentReply:
        if isinstance(call, Reset):
            environment = self._live[call.key] = self._make()
            takes_seed = "seed" in inspect.signature(environment.reset).parameters
            given = {"seed": call.seed} if takes_seed else {}
            return EnvironmentReply(_messages(await _awaited(environment.reset(call.row, **given))))
        if isinstance(call, Close):
            environment = self._live.pop(call.key, None)
            await _awaited(environment.close() if hasattr(environment, "close") else None)
            return EnvironmentReply([])
        if call.key not in self._live:
            raise _Unfit("died", "the process that held it was ended")
        result = await _awaited(self._live[call.key].step(call.completion))
        if not isinstance(result, tuple) or len(result) != 3:
            raise _Unfit("wrong length", f"gave a {type(result).__name__}, not (messages, reward, is_done)")
        return EnvironmentReply(_messages(result[0]), _number(result[1]), bool(result[2]))


def _interrupt(signum: int, frame: Any) -> None:
    raise _Blocked


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _messages(said: Any) -> Messages:
    if said is None or isinstance(said, str):
        return [] if said is None else [{"role": "user", "content": said}]
    try:
        messages = [{"role": message["role"], "content": message["content"]} for message in said]
    except (TypeError, KeyError) as error:
        raise _Unfit("not messages", "gave neither a text nor messages with role and content") from error
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise _Unfit("not messages", "gave a message whose role or content is not a string")
    return messages


def _number(reward: Any) -> float | None:
    number = None if reward is None else finite_number("it", reward)
    if isinstance(number, Failure):
        raise _Unfit(number.cause, number.message)
    return number
