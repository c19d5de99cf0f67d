"""Run coroutines of the user's code side by side in one event loop, each with a deadline.

Time in which other code blocks the loop does not count. Code that itself blocks the loop for too long is
interrupted by a signal, so all of this needs a process's main thread.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import coroutine
from typing import Any, Generic, TypeVar

from qerl.tasks.scoring import Failure, failure_of

_MIN_BLOCKED_S = 0.01  # the deadlines of other calls are extended if code blocks the loop for longer
Result = TypeVar("Result")


class InvalidReturn(Exception):
    """The user's code returned something invalid: (cause, message)."""


class _Blocked(BaseException):
    """Raised inside code that blocks the loop. Not an Exception, so that the code does not catch it."""


Job = Callable[[], Coroutine[Any, Any, Result]]


class GuardedLoop(Generic[Result]):
    def __init__(self, *, max_concurrent: int, deadline_s: float, block_s: float | None = None):
        """block_s: the longest that code may run between two awaits; None: deadline_s."""
        self._max_concurrent, self._deadline_s = max_concurrent, deadline_s
        self._block_s = block_s or deadline_s
        self._clocks: set[asyncio.Timeout] = set()
        self._runner: asyncio.Runner | None = None

    def run(
        self,
        jobs: Sequence[tuple[str, Job[Result]]],
        on_end: Callable[[int, Result | Failure], None] = lambda index, ended: None,
    ) -> list[Result | Failure] | BaseException:
        """Return the result of each (name, job), or what a task that the user's code left behind raised: the
        event loop is then closed. on_end: called with (index, result) when a job has ended."""
        if self._runner is None:
            signal.signal(signal.SIGALRM, _interrupt)
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(self._all(jobs, on_end))
        except BaseException as error:
            self._runner = None
            return error

    async def _all(
        self, jobs: Sequence[tuple[str, Job[Result]]], on_end: Callable[[int, Result | Failure], None]
    ) -> list[Result | Failure]:
        gate = asyncio.Semaphore(self._max_concurrent)

        async def run_one(index: int, name: str, job: Job[Result]) -> Result | Failure:
            async with gate:
                ended = await self._one(name, job)
                on_end(index, ended)
                return ended

        return await asyncio.gather(*(run_one(i, *named) for i, named in enumerate(jobs)))

    async def _one(self, name: str, job: Job[Result]) -> Result | Failure:
        clock = asyncio.timeout(self._deadline_s)
        try:
            async with clock:
                self._clocks.add(clock)
                return await self._run_with_alarm(job(), clock)
        except BaseException as error:  # SystemExit too: it fails the sample and must not end the process
            if clock.expired():
                return Failure("over the deadline", f"{name}: not done after {self._deadline_s:g} s")
            if isinstance(error, _Blocked):
                blocked = "" if self._block_s == self._deadline_s else "blocked the event loop: "
                return Failure("over the deadline", f"{name}: {blocked}not done after {self._block_s:g} s")
            if isinstance(error, InvalidReturn):
                return Failure(error.args[0], f"{name}: {error.args[1]}")
            return failure_of(name, error)
        finally:
            self._clocks.discard(clock)

    @coroutine
    def _run_with_alarm(self, code: Any, clock: asyncio.Timeout) -> Generator[Any, Any, Any]:
        """Run the code from one await to the next, each part under its own alarm."""
        value, error = None, None
        while True:
            begin_s = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._block_s)
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


def _interrupt(signum: int, frame: Any) -> None:
    raise _Blocked
