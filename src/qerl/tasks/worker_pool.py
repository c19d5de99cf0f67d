"""A pool of worker processes that run one job at a time and can be killed.

    parent --+-- forwarder         copies what the workers print, at a limited rate
             +-- keeper -- worker  the keeper leads a process group: the worker's, and of any process that a
             +-- keeper -- worker  worker starts

Workers are forked, so a closure or a notebook's function needs no pickling; only items and outcomes are
pickled. Neither Ctrl-C nor a SIGTERM sent to every process ends them: the parent decides. Losing a worker, or
stopping the pool, kills its group, and with it any child that a job left behind. A job that signals its
parent or its process group reaches its own keeper and worker only (worker_process.py).

On Linux, a worker may have memory_bytes more than it started with (beyond that: MemoryError), the number of
its tasks is limited, and the kernel kills it first if memory runs out. Deadlines use the monotonic clock.
`pebble` was rejected: it uses the wall clock and treats a job that exits with code 0 as one that hangs
(tests/faults/test_bad_reward.py).
"""

import contextlib
import dataclasses
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from qerl.errors import RunError
from qerl.tasks.worker_process import (
    END_FORWARDING,
    Channel,
    ForkedProcess,
    WorkerLost,
    fork_process,
    forward_output,
    keep,
    lost,
)

MEMORY_BYTES = 8 << 30
_POLL_S = 0.1  # the end of a worker is seen at once, that of its keeper after so long
_END_S = 1.0


@dataclasses.dataclass(slots=True)
class _Worker:
    keeper: ForkedProcess
    channel: Channel
    item: int | None = None
    end_s: float = 0.0
    """Deadline of the item, by time.monotonic()."""

    def outcome(self, limit_s: float) -> tuple[Any] | None:
        """Return (outcome of the item,), or None while there is none."""
        try:
            outcome = self.channel.receive()
        except EOFError:
            outcome = (lost(self.keeper.kill()),)
        except ValueError:
            outcome = (
                WorkerLost("no outcome", "its process wrote something else to the socket of outcomes"),
            )
        if outcome is None and (code := self.keeper.poll()) is not None:
            outcome = (lost(code),)
        if outcome is None and time.monotonic() >= self.end_s:
            outcome = (WorkerLost("over the deadline", f"not done after {limit_s:g} s"),)
        return outcome

    def end(self) -> None:
        """Kill the worker, its keeper and all that it has started. Hang up before."""
        self.keeper.wait(_END_S)  # the keeper reaps the worker, unless it was stopped or the worker hangs
        self.keeper.kill_group()


class WorkerPool:
    """Run `work(item)` for many items, num_workers at a time. Items and outcomes must be picklable."""

    def __init__(self, work: Callable[[Any], Any], *, num_workers: int, memory_bytes: int = MEMORY_BYTES):
        self._work, self._num_workers, self._memory_bytes = work, num_workers, memory_bytes
        self._workers: list[_Worker] = []
        self._output: int | None = None
        self.jobs: Jobs | None = None
        """The latest batch of jobs, the only one that goes on."""
        self._start()

    def run(self, items: list[Any], *, deadline_s: float) -> list[Any]:
        """Return the outcome of each item in order: a WorkerLost if it took too long or its worker ended."""
        jobs = self.begin(deadline_s=deadline_s)
        jobs.add(items)
        return jobs.wait()

    def begin(self, *, deadline_s: float) -> "Jobs":
        """Return an empty batch of jobs. An earlier batch that was never waited for is cancelled."""
        processes = [self._forwarder, *(worker.keeper for worker in self._workers)]
        is_whole = len(self._workers) == self._num_workers and all(p.poll() is None for p in processes)
        if not is_whole or not all(w.item is None and w.channel.is_idle() for w in self._workers):
            self.stop()
        self.jobs = Jobs(self, deadline_s)
        return self.jobs

    @property
    def is_busy(self) -> bool:
        """True if a worker has a job."""
        return any(worker.item is not None for worker in self._workers)

    def advance(self, jobs: "Jobs", *, waits: bool) -> None:
        """Give idle workers the waiting items, and store the outcomes that have come; waits: wait for one."""
        assert self.jobs is jobs, "another batch of jobs has begun"
        try:
            self._collect(jobs, waits=False)
            self._send_items(jobs)
            if waits:
                self._collect(jobs, waits=True)
        except BaseException:  # pending outcomes must not be mistaken for those of the next items
            self.stop()
            raise

    def _send_items(self, jobs: "Jobs") -> None:
        if jobs.waiting and not self._workers:
            self.stop()  # also kills processes that may have filled the process table
            self._start()
        for worker in self._workers:
            if jobs.waiting and worker.item is None:
                worker.item = jobs.waiting.popleft()
                worker.end_s = time.monotonic() + jobs.limits_s[worker.item]
                worker.channel.send(jobs.items[worker.item], end_s=worker.end_s)

    def _collect(self, jobs: "Jobs", *, waits: bool) -> None:
        busy = [worker for worker in self._workers if worker.item is not None]
        if not busy:
            return
        if waits:
            left_s = min(worker.end_s for worker in busy) - time.monotonic()
            wait([worker.channel.socket for worker in busy], max(0.0, min(left_s, _POLL_S)))
        for worker in busy:
            assert worker.item is not None
            outcome = worker.outcome(jobs.limits_s[worker.item])
            if outcome is not None:
                (jobs.outcomes[worker.item],) = outcome
                worker.item = None
                if isinstance(outcome[0], WorkerLost):
                    self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.channel.close()
        worker.end()
        self._workers.remove(worker)
        with contextlib.suppress(OSError):  # too many processes: continue with the other workers
            self._workers.append(self._start_worker())

    def _start(self) -> None:
        try:
            output, self._output = os.pipe()
            try:
                self._forwarder = fork_process(forward_output, os.getpid(), output)
            finally:
                os.close(output)
            for _ in range(self._num_workers):
                self._workers.append(self._start_worker())
        except OSError as error:
            raise RunError(f"cannot start a process for the rewards: {error.strerror}") from error

    def _start_worker(self) -> _Worker:
        assert self._output is not None
        pool_end, worker_end = socket.socketpair()
        channel = Channel(pool_end)
        try:
            keeper = fork_process(keep, os.getpid(), worker_end, self._output, self._memory_bytes, self._work)
        except OSError:
            pool_end.close()
            raise
        finally:
            worker_end.close()
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(keeper.pid, keeper.pid)  # the keeper sets it too; the first one wins
        return _Worker(keeper, channel)

    def stop(self) -> None:
        """Kill the processes and all that they have started, without waiting for jobs."""
        for worker in self._workers:
            worker.channel.close()
        for worker in self._workers:
            worker.end()
        self._forwarder.end(END_FORWARDING, 1.0)  # it says first how much it left out
        self._workers = []
        if self._output is not None:
            os.close(self._output)
            self._output = None


class Jobs:
    """Items that the workers of a pool compute while others are still to come.

    Items are sent and outcomes taken in `poll` and `wait` only: a thread for it would have to fork the
    workers that replace lost ones, and a worker ends with the thread that forked it.
    """

    def __init__(self, pool: WorkerPool, deadline_s: float):
        self._pool, self._deadline_s = pool, deadline_s
        self.items: list[Any] = []
        self.limits_s: list[float] = []
        """Seconds that each item may take."""
        self.outcomes: list[Any] = []
        self.waiting: deque[int] = deque()
        """Indices of the items that no worker has got."""
        self._polled_s: float | None = None
        self.busy_s = 0.0
        """Seconds between polls at whose beginning a worker had a job."""

    def add(self, items: list[Any], *, num_deadlines: int = 1) -> range:
        """Append items, each of which may take this many deadlines; return their indices among the
        outcomes."""
        added = range(len(self.items), len(self.items) + len(items))
        self.items += items
        self.limits_s += [num_deadlines * self._deadline_s] * len(items)
        self.outcomes += [None] * len(items)
        self.waiting += added
        return added

    def poll(self) -> None:
        """Give idle workers items and take the outcomes that have come, without waiting for any. A job's time
        is up where a poll finds it so."""
        self._note_busy()
        self._pool.advance(self, waits=False)
        self._polled_s = time.monotonic() if self._pool.is_busy else None

    def wait(self) -> list[Any]:
        """Return the outcome of each item in order: a WorkerLost if it took too long or its worker ended."""
        self._note_busy()
        while self.waiting or self._pool.is_busy:
            self._pool.advance(self, waits=True)
        return self.outcomes

    def _note_busy(self) -> None:
        if self._polled_s is not None:
            self.busy_s += time.monotonic() - self._polled_s
            self._polled_s = None
