"""Run coroutines of the user's code side by side in one event loop, each with a deadline.

Time in which other code blocks the loop does not count. Code that itself blocks the loop for too long, in
the coroutine or a task that it made, is interrupted by a signal, so all of this needs a process's main
thread. A child that the code forks ends where the code returns to the loop, which it has too.
"""

import asyncio
import contextvars
import os
import signal
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from qerl.tasks.scoring import Failure, failure_of

_MIN_BLOCKED_S = 0.01  # the deadlines of other calls are extended if code blocks the loop for longer
_MIN_THREADS = 32
Result = TypeVar("Result")


class InvalidReturn(Exception):
    """The user's code returned something invalid: (cause, message)."""


class _Blocked(BaseException):
    """Raised inside code that blocks the loop. Not an Exception, so that the code does not catch it."""


Job = Callable[[], Coroutine[Any, Any, Result]]
_CLOCK: contextvars.ContextVar[asyncio.Timeout | None] = contextvars.ContextVar("clock", default=None)
"""The deadline of the job whose code runs; None outside of it."""


class GuardedLoop(Generic[Result]):
    def __init__(self, *, max_concurrent: int, deadline_s: float, block_s: float | None = None):
        """block_s: the longest that code may run between two awaits; None: deadline_s."""
        self._max_concurrent, self._deadline_s = max_concurrent, deadline_s
        self._block_s = block_s or deadline_s
        self._clocks: set[asyncio.Timeout] = set()
        self._runner: asyncio.Runner | None = None
        self._threads: CountedThreads | None = None

    @property
    def has_busy_threads(self) -> bool:
        """True if the code left a thread behind, such as a tool that hangs in asyncio.to_thread."""
        return self._threads is not None and bool(self._threads.running)

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
            self._runner.get_loop().set_task_factory(self._task)
            self._threads = None
        if self._threads is None or self._threads.running:  # those that hang keep their places
            self._threads = CountedThreads(max(self._max_concurrent, _MIN_THREADS))
            self._runner.get_loop().set_default_executor(self._threads)
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
                _CLOCK.set(clock)  # tasks that the code makes inherit it
                return await self._guarded(job(), clock)
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

    def _task(self, loop: asyncio.AbstractEventLoop, code: Any, **options: Any) -> asyncio.Task:
        clock = _CLOCK.get()
        return asyncio.Task(code if clock is None else self._guarded(code, clock), loop=loop, **options)

    def _guarded(self, code: Coroutine[Any, Any, Any], clock: asyncio.Timeout) -> "_GuardedCode":
        return _GuardedCode(code, self._block_s, lambda blocked_s: self._extend_deadlines(blocked_s, clock))

    def _extend_deadlines(self, blocked_s: float, clock: asyncio.Timeout) -> None:
        for other in self._clocks if blocked_s > _MIN_BLOCKED_S else ():
            when_s = other.when()
            if other is not clock and when_s is not None and not other.expired():
                other.reschedule(when_s + blocked_s)


class CountedThreads(ThreadPoolExecutor):
    """Knows its calls that have not ended; asyncio's own has six threads on two processors."""

    def __init__(self, max_workers: int):
        super().__init__(max_workers, "loop")
        self.running: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future = super().submit(fn, *arguments, **options)
        self.running.add(future)
        future.add_done_callback(self.running.discard)
        return future


class _GuardedCode(Coroutine[Any, Any, Any]):
    """A coroutine whose parts, from one await to the next, each run under an alarm of their own."""

    def __init__(self, code: Coroutine[Any, Any, Any], block_s: float, on_part: Callable[[float], None]):
        """on_part: called with the seconds that a part took."""
        self._code, self._block_s, self._on_part, self._pid = code, block_s, on_part, os.getpid()

    def send(self, value: Any) -> Any:
        return self._run(self._code.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._code.throw, *error)

    def close(self) -> None:
        self._code.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            try:
                awaited = self.send(value) if error is None else self.throw(error)
            except StopIteration as end:
                return end.value
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as caught:  # pass a cancellation to the code
                error = caught

    def __getattr__(self, name: str) -> Any:
        """Return cr_frame, cr_running, ..., by which anyio asks whether a task has begun."""
        return getattr(self._code, name)

    def _run(self, part: Callable[..., Any], *arguments: Any) -> Any:
        begin_s = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self._block_s)
        try:
            return part(*arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != self._pid:
                os._exit(0)  # a child that the code forked must not run the parent's other coroutines
            self._on_part(time.monotonic() - begin_s)


def _interrupt(signum: int, frame: Any) -> None:
    raise _Blocked
