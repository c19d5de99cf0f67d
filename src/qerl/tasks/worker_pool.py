"""A pool of worker processes that run one job at a time and can be killed.

    parent --+-- supervisor  leads a process group; forwards what the workers print, at a limited rate; kills
             |               the group when the parent has ended
             +-- worker      in the supervisor's group, like any process that a worker starts
             +-- worker

Workers are forked, so a closure or a notebook's function needs no pickling; only items and outcomes are
pickled. Neither Ctrl-C nor a SIGTERM sent to every process ends them: the parent decides. Stopping the pool
kills the group, and with it any child that a job left behind; losing a worker does the same once the other
jobs are done.

On Linux, a worker may map memory_bytes more than it started with (beyond that: MemoryError), the number of
its tasks is limited, and the kernel kills it first if memory runs out. Deadlines use the monotonic clock.
`pebble` was rejected: it uses the wall clock and treats a job that exits with code 0 as one that hangs
(tests/faults/test_bad_reward.py).
"""

import contextlib
import dataclasses
import gc
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from qerl.errors import RunError

MEMORY_BYTES = 8 << 30
MOST_PRINTED = 1 << 16
"""Bytes per second forwarded to stderr."""
MORE_TASKS = 2048
"""Processes and threads of the user beyond the number on the whole machine when the worker started."""
_WATCH_S = 0.5
_POLL_S = 0.1  # a worker's end is seen at once unless a child of it still holds its end of the pipe


class WorkerLost(Exception):
    """A job without outcome: `WorkerLost("died", "its process was killed by SIGSEGV")`."""

    def __init__(self, cause: str, message: str):
        super().__init__(cause, message)
        self.cause, self.message = cause, message


@dataclasses.dataclass(slots=True)
class ForkedProcess:
    """A child process, collected once."""

    pid: int
    code: int | None = None
    """Exit code as in subprocess: negative for a signal."""

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._wait(os.WNOHANG)

    def kill(self) -> int:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        code = self._wait(0)
        assert code is not None
        return code

    def _wait(self, options: int) -> int | None:
        if self.code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another waitpid(-1) collected it
                pid, status = self.pid, 0
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


@dataclasses.dataclass(slots=True)
class _Worker:
    process: ForkedProcess
    pipe: Connection
    item: int | None = None
    end: float = 0.0
    """Deadline of the item, by time.monotonic()."""


class WorkerPool:
    """Run `work(item)` for many items, num_workers at a time. Items and outcomes must be picklable."""

    def __init__(self, work: Callable[[Any], Any], *, num_workers: int, memory_bytes: int = MEMORY_BYTES):
        self._work, self._num_workers, self._memory_bytes = work, num_workers, memory_bytes
        self._workers: list[_Worker] = []
        self._output: int | None = None
        self._start()

    def run(self, items: list[Any], *, deadline_s: float) -> list[Any]:
        """Return the outcome of each item in order: a WorkerLost if it took too long or its worker ended."""
        outcomes: list[Any] = [None] * len(items)
        waiting = deque(range(len(items)))
        try:
            processes = [self._supervisor, *(worker.process for worker in self._workers)]
            if any(process.poll() is not None for process in processes):
                self.stop()
            while waiting or any(worker.item is not None for worker in self._workers):
                self._send_items(items, waiting, deadline_s)
                self._collect(outcomes, deadline_s)
            if any(isinstance(outcome, WorkerLost) for outcome in outcomes):
                self.stop()
                self._start()
        except BaseException:  # pending outcomes must not be mistaken for those of the next items
            self.stop()
            raise
        return outcomes

    def _send_items(self, items: list[Any], waiting: deque[int], deadline_s: float) -> None:
        if not self._workers:
            self.stop()  # also kills processes that may have filled the process table
            self._start()
        for worker in self._workers:
            if waiting and worker.item is None:
                worker.item, worker.end = waiting.popleft(), time.monotonic() + deadline_s
                # A worker that has ended is handled by _collect.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    worker.pipe.send(items[worker.item])

    def _collect(self, outcomes: list[Any], deadline_s: float) -> None:
        busy = [worker for worker in self._workers if worker.item is not None]
        if not busy:
            return
        left_s = min(worker.end for worker in busy) - time.monotonic()
        wait([worker.pipe for worker in busy], max(0.0, min(left_s, _POLL_S)))
        for worker in busy:
            outcome = _outcome(worker, deadline_s)
            if outcome is not None:
                assert worker.item is not None
                (outcomes[worker.item],) = outcome
                worker.item = None
                if isinstance(outcome[0], WorkerLost):
                    self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.pipe.close()
        self._workers.remove(worker)
        with contextlib.suppress(OSError):  # too many processes: continue with the other workers
            self._workers.append(self._start_worker())

    def _start(self) -> None:
        try:
            output, self._output = os.pipe()
            try:
                self._supervisor = fork_process(_supervise, os.getpid(), output)
            finally:
                os.close(output)
            with contextlib.suppress(PermissionError, ProcessLookupError):
                group = self._supervisor.pid  # the supervisor sets it too; the first one wins
                os.setpgid(group, group)
            for _ in range(self._num_workers):
                self._workers.append(self._start_worker())
        except OSError as error:
            raise RunError(f"cannot start a process for the rewards: {error.strerror}") from error

    def _start_worker(self) -> _Worker:
        assert self._output is not None
        ours, theirs = Pipe()
        with theirs:
            arguments = (theirs, self._supervisor.pid, self._output, self._memory_bytes, self._work)
            return _Worker(fork_process(_serve, *arguments), ours)

    def stop(self) -> None:
        """Kill the processes and all that they have started, without waiting for jobs."""
        if self._supervisor.poll() is None:
            os.killpg(self._supervisor.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.process.kill()
            worker.pipe.close()
        self._supervisor.kill()
        self._workers = []
        if self._output is not None:
            os.close(self._output)
            self._output = None


def _outcome(worker: _Worker, deadline_s: float) -> tuple[Any] | None:
    """Return (outcome of the worker's item,), or None while there is none."""
    if worker.pipe.poll():
        try:
            return (worker.pipe.recv(),)
        except (EOFError, OSError, pickle.UnpicklingError):
            return (_lost(worker.process.kill()),)
    if (code := worker.process.poll()) is not None:
        return (_lost(code),)
    if time.monotonic() >= worker.end:
        return (WorkerLost("over the deadline", f"not done after {deadline_s:g} s"),)
    return None


def _lost(code: int) -> WorkerLost:
    if code < 0:
        return WorkerLost("died", f"its process was killed by {signal.Signals(-code).name}")
    return WorkerLost("ended its process", f"exit code {code}")


def fork_process(main: Callable[..., None], *arguments: Any) -> ForkedProcess:
    """Start a process that runs main(*arguments) and exits."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns about forks beside threads; the workers use no thread of the parent.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        gc.freeze()  # collecting the parent's objects here would free its GPU memory
        try:
            main(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return ForkedProcess(pid)


def _supervise(parent: int, output: int) -> None:
    """Main function of the supervisor. It polls, which works on every Unix and from any forking thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    window_end, left, num_dropped = 0.0, 0, 0
    while os.getppid() == parent:
        text = os.read(output, 4096) if select.select([output], [], [], _WATCH_S)[0] else b""
        if time.monotonic() >= window_end:
            if num_dropped:
                _write_stderr(f"\n[omitted {num_dropped} more bytes printed by rewards]\n".encode())
            window_end, left, num_dropped = time.monotonic() + 1.0, MOST_PRINTED, 0
        if text:
            shown = text[:left] if _write_stderr(text[:left]) else b""
            left -= len(shown)
            num_dropped += len(text) - len(shown)
    os.killpg(0, signal.SIGKILL)


def _write_stderr(text: bytes) -> bool:
    """Return True if the text could be written without blocking; a slow reader must not stop us."""
    try:
        return bool(select.select([], [2], [], 0)[1]) and bool(os.write(2, text))
    except OSError:
        return False


def _serve(pipe: Connection, group: int, output: int, memory_bytes: int, work: Callable[[Any], Any]) -> None:
    """Main function of a worker."""
    _set_up_worker(group, output, memory_bytes)
    pid = os.getpid()
    while True:
        item = pipe.recv()
        outcome = work(item)
        if os.getpid() != pid:
            os._exit(0)  # a child forked by the job returned here: it must not continue as a worker
        pipe.send(outcome)


def _set_up_worker(group: int, output: int, memory_bytes: int) -> None:
    try:
        os.setpgid(0, group)
    except (PermissionError, ProcessLookupError):
        os._exit(0)  # the group is gone: the pool is being stopped
    pid = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a child that a job forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ignore)  # not SIG_IGN, which programs that a job starts would inherit
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    if sys.platform == "linux":
        _limit(memory_bytes)


def _limit(memory_bytes: int) -> None:
    """Set soft limits: a reward may raise them."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    num_tasks = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    for kind, most in (
        (resource.RLIMIT_AS, mapped_bytes + memory_bytes),
        (resource.RLIMIT_NPROC, num_tasks + MORE_TASKS),
    ):
        soft, hard = resource.getrlimit(kind)
        known = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min([most, *known]), hard))
