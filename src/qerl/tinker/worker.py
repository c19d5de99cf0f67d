"""The thread that owns the device: jobs of training clients and samplers, lane by lane in turn.

A lane is one training client, one sampler, or all samplers together where they share decode steps. Its jobs
run in order; lanes with jobs take turns, so that nobody waits for more than one turn of each other lane. A
turn of a training client is one request; one of samplers is all their requests in one batch, which new ones
join, until they are done, or others wait and max_turn_s have passed: then it goes on in its next turn.
"""

import collections
import dataclasses
import logging
import math
import threading
import time
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
    progress: Any = None
    """The state from which the next turn goes on."""
    done_s: float = math.inf
    """time.monotonic() when it ended."""

    def __post_init__(self):
        self.future.add_done_callback(self._note_end)

    def _note_end(self, future: Future) -> None:
        self.done_s = time.monotonic()

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclasses.dataclass(eq=False, slots=True)
class Lane:
    run: Callable[["LaneTurn"], None]
    """Finishes the turn's jobs, or puts them back; what it raises is the failure of all others."""
    takes_all: bool
    """True if a turn takes all waiting jobs."""
    jobs: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)


class LaneTurn:
    """A turn of a lane, in the worker."""

    def __init__(self, worker: "DeviceWorker", lane: Lane, jobs: list[Job]):
        self.jobs, self._worker, self._lane, self._began_s = jobs, worker, lane, time.monotonic()

    def new_jobs(self) -> list[Job]:
        """Return the jobs that have come since; they belong to the turn too."""
        new = self._worker.take(self._lane)
        self.jobs += new
        return new

    def is_over(self, *, for_own_lane: bool) -> bool:
        """True if others wait and the turn has lasted as long as one may; for_own_lane: jobs of this lane
        wait that cannot join."""
        lasted_s = time.monotonic() - self._began_s
        return lasted_s >= self._worker.max_turn_s and (for_own_lane or self._worker.has_others(self._lane))

    def put_back(self, jobs: list[Job]) -> None:
        """Go on with these in the lane's next turn, before those that wait."""
        later = set(map(id, jobs))
        self.jobs = [job for job in self.jobs if id(job) not in later]
        self._worker.put_back(self._lane, jobs)


class DeviceWorker:
    def __init__(self, max_turn_s: float):
        """max_turn_s: how long a turn may last while others wait, if it can be interrupted."""
        self.max_turn_s = max_turn_s
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

    def take(self, lane: Lane) -> list[Job]:
        """Take all waiting jobs of the lane."""
        with self._changed:
            jobs = list(lane.jobs)
            lane.jobs.clear()
        return jobs

    def put_back(self, lane: Lane, jobs: list[Job]) -> None:
        with self._changed:
            lane.jobs.extendleft(reversed(jobs))
            if lane.jobs and lane not in self._ready:
                self._ready.append(lane)

    def has_others(self, lane: Lane) -> bool:
        """True if another lane has waiting jobs."""
        with self._changed:
            return any(other is not lane and other.jobs for other in self._ready)

    def drop(self, lane: Lane) -> None:
        """Fail the lane's waiting jobs."""
        for job in self.take(lane):
            job.fail(UserError("the session has ended, or the model was unloaded"))

    def run_later(self, work: Callable[[], None]) -> None:
        """Call the function after the present turn; an error is logged."""
        self.submit(Lane(lambda turn: work(), takes_all=False), Job(None))

    def _run(self) -> None:
        while (following := self._next()) is not None:
            lane, jobs = following
            turn = LaneTurn(self, lane, jobs)
            try:
                lane.run(turn)
            except Exception as error:  # of these jobs; the others go on
                if isinstance(error, RunError):
                    _logger.error("%s", error)
                elif not isinstance(error, UserError):
                    _logger.error("a request failed", exc_info=error)
                for job in turn.jobs:
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
