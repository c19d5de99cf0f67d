"""The thread that owns the device: jobs of training clients and samplers, lane by lane in turn.

A lane is one training client or one sampler. Its jobs run in order; lanes with jobs take turns, so that
nobody waits for more than one turn of each other lane. A turn of a training client is one request; one of a
sampler is all requests that wait for it, together in one batch.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from qerl.errors import RunError, UserError

_logger = logging.getLogger("uvicorn.error")
_SHUTDOWN_TIMEOUT_S = 10.0


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request; its result is the response's body: bytes of protobuf, or an object for JSON."""

    work: Any
    """The input of the lane's `run`."""
    future: Future = dataclasses.field(default_factory=Future)
    is_cancelled: bool = False
    taken_s: float | None = None
    """time.monotonic() when a client took its result."""

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclasses.dataclass(eq=False, slots=True)
class Lane:
    run: Callable[[list[Job]], None]
    """Finishes these jobs; what it raises is the failure of all that it has not finished."""
    takes_all: bool
    """True if a turn takes all waiting jobs."""
    jobs: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)


class DeviceWorker:
    def __init__(self):
        self._ready: collections.deque[Lane] = collections.deque()
        self._changed, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="tinker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the present turn; jobs that wait fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_SHUTDOWN_TIMEOUT_S)

    def submit(self, lane: Lane, job: Job) -> None:
        with self._changed:
            lane.jobs.append(job)
            if lane not in self._ready:
                self._ready.append(lane)
            self._changed.notify_all()

    def drop(self, lane: Lane) -> None:
        """Fail the lane's waiting jobs."""
        with self._changed:
            jobs = list(lane.jobs)
            lane.jobs.clear()
        for job in jobs:
            job.fail(UserError("the session has ended"))

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            lane, jobs = turn
            try:
                lane.run(jobs)
            except Exception as error:  # of these jobs; the others go on
                if isinstance(error, RunError):
                    _logger.error("%s", error)
                elif not isinstance(error, UserError):
                    _logger.error("a request failed", exc_info=error)
                for job in jobs:
                    job.fail(error)
        for lane in list(self._ready):
            self.drop(lane)

    def _next(self) -> tuple[Lane, list[Job]] | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._is_closed or self._ready)
                if self._is_closed:
                    return None
                lane = self._ready.popleft()
                jobs = [
                    lane.jobs.popleft() for _ in range(len(lane.jobs) if lane.takes_all else 1) if lane.jobs
                ]
                if lane.jobs:
                    self._ready.append(lane)
                if jobs:
                    return lane, jobs
