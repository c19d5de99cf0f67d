"""Processes that do one job at a time and may be killed.

    parent --+-- warden      leads a process group; passes on what the others print, so much a second and no
             |               more; kills the whole group once the parent is gone
             +-- worker      in the warden's group, as is whatever a worker starts
             +-- worker

Workers are forked, so that a closure or a notebook's function needs no pickling; only items and outcomes
travel. Neither Ctrl-C nor a SIGTERM that a scheduler sends to every process ends them: the parent decides.
Stopping kills the group, and so a child that a job left behind; losing a worker does the same once the other
jobs are done.

A worker may map memory_bytes beyond what it began with (then MemoryError), be one of so many tasks and no
more, and is what the kernel ends first where memory is short. Linux alone has these three. Deadlines are by
the monotonic clock. `pebble`, which could stand here, counts by the wall clock and takes a job that ends its
process with exit code 0 for one that hangs (tests/faults/test_bad_reward.py).
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
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from qerl.errors import RunError

MEMORY_BYTES = 8 << 30
MOST_PRINTED = 1 << 16
"""Bytes a second that are passed on to stderr."""
MORE_TASKS = 2048
"""Processes and threads of the user beyond all that the machine ran when the worker began."""
_WATCH_S = 0.5
_POLL_S = 0.1  # a death is seen at once, but where a child of the worker holds its end of the line


class WorkerLost(Exception):
    """A job that came to no end: `Lost("died", "killed by SIGSEGV")`, `Lost("over the deadline", "10 s")`."""

    def __init__(self, cause: str, message: str):
        super().__init__(cause, message)
        self.cause, self.message = cause, message


@dataclasses.dataclass(slots=True)
class _Process:
    pid: int
    code: int | None = None
    """How it ended, as subprocess says it: negative for a signal."""

    def ended(self) -> int | None:
        """Its code, or None while it runs and its pid is nobody else's."""
        return self._taken(os.WNOHANG)

    def end(self) -> int:
        if self.ended() is None:
            os.kill(self.pid, signal.SIGKILL)
        code = self._taken(0)
        assert code is not None
        return code

    def _taken(self, options: int) -> int | None:
        if self.code is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # somebody's waitpid(-1) had it
                pid, status = self.pid, 0
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


@dataclasses.dataclass(slots=True)
class _Worker:
    process: _Process
    line: Connection
    item: int | None = None
    end: float = 0.0
    """Of the item's time, by time.monotonic()."""


class WorkerPool:
    """Runs `work(item)` for many items, num_workers at a time. Items and outcomes must be picklable."""

    def __init__(self, work: Callable[[Any], Any], *, num_workers: int, memory_bytes: int = MEMORY_BYTES):
        self._work, self._num_workers, self._memory_bytes = work, num_workers, memory_bytes
        self._workers: list[_Worker] = []
        self._printed: int | None = None
        self._start()

    def run(self, items: list[Any], *, deadline_s: float) -> list[Any]:
        """The outcome of each item in order; Lost for one that took longer or whose worker is gone."""
        outcomes: list[Any] = [None] * len(items)
        waiting = deque(range(len(items)))
        try:
            everyone = [self._warden, *(worker.process for worker in self._workers)]
            if any(process.ended() is not None for process in everyone):
                self.stop()
            while waiting or any(worker.item is not None for worker in self._workers):
                self._hand_out(items, waiting, deadline_s)
                self._collect(outcomes, deadline_s)
            if any(isinstance(outcome, WorkerLost) for outcome in outcomes):
                self.stop()
                self._start()
        except BaseException:  # outcomes still to come must not be taken for those of the next items
            self.stop()
            raise
        return outcomes

    def _hand_out(self, items: list[Any], waiting: deque[int], deadline_s: float) -> None:
        if not self._workers:
            self.stop()  # with what fills the table of processes, where that is why there are none
            self._start()
        for worker in self._workers:
            if waiting and worker.item is None:
                worker.item, worker.end = waiting.popleft(), time.monotonic() + deadline_s
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: _collect will see it
                    worker.line.send(items[worker.item])

    def _collect(self, outcomes: list[Any], deadline_s: float) -> None:
        busy = [worker for worker in self._workers if worker.item is not None]
        if not busy:
            return
        left_s = min(worker.end for worker in busy) - time.monotonic()
        wait([worker.line for worker in busy], max(0.0, min(left_s, _POLL_S)))
        for worker in busy:
            found = _outcome(worker, deadline_s)
            if found is not None:
                assert worker.item is not None
                (outcomes[worker.item],) = found
                worker.item = None
                if isinstance(found[0], WorkerLost):
                    self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.process.end()
        worker.line.close()
        self._workers.remove(worker)
        with contextlib.suppress(OSError):  # too many processes: the other workers go on alone
            self._workers.append(self._started())

    def _start(self) -> None:
        try:
            printed, self._printed = os.pipe()
            try:
                self._warden = _forked(_guard, os.getpid(), printed)
            finally:
                os.close(printed)
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(self._warden.pid, self._warden.pid)  # the warden does it too: whoever is first
            for _ in range(self._num_workers):
                self._workers.append(self._started())
        except OSError as error:
            raise RunError(f"no process can be started for the rewards: {error.strerror}") from error

    def _started(self) -> _Worker:
        assert self._printed is not None
        ours, theirs = Pipe()
        with theirs:
            given = (theirs, self._warden.pid, self._printed, self._memory_bytes, self._work)
            return _Worker(_forked(_serve, *given), ours)

    def stop(self) -> None:
        """Ends the processes and all that they have started, without waiting for jobs."""
        if self._warden.ended() is None:
            os.killpg(self._warden.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.process.end()
            worker.line.close()
        self._warden.end()
        self._workers = []
        if self._printed is not None:
            os.close(self._printed)
            self._printed = None


def _outcome(worker: _Worker, deadline_s: float) -> tuple[Any] | None:
    """(what came of the worker's item,), or None as long as nothing has."""
    if worker.line.poll():
        try:
            return (worker.line.recv(),)
        except (EOFError, OSError, pickle.UnpicklingError):
            return (_lost(worker.process.end()),)
    if (code := worker.process.ended()) is not None:
        return (_lost(code),)
    if time.monotonic() >= worker.end:
        return (WorkerLost("over the deadline", f"not done after {deadline_s:g} s"),)
    return None


def _lost(code: int) -> WorkerLost:
    if code < 0:
        return WorkerLost("died", f"its process was killed by {signal.Signals(-code).name}")
    return WorkerLost("ended its process", f"exit code {code}")


def _forked(life: Callable[..., None], *given: Any) -> _Process:
    """A process that lives life(*given) and nothing of what follows here."""
    sys.stdout.flush()
    sys.stderr.flush()
    with _forking():
        pid = os.fork()
    if pid == 0:
        gc.freeze()  # cycles of the parent's may hold what is its GPU's: they are not this process's to free
        try:
            life(*given)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return _Process(pid)


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Python 3.12 warns of any fork beside threads; the workers take up none of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        yield


def _guard(parent: int, printed: int) -> None:
    """The warden's whole life. It polls, which works on every Unix and whichever thread has forked it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    window_end, left, num_dropped = 0.0, 0, 0
    while os.getppid() == parent:
        text = os.read(printed, 4096) if select.select([printed], [], [], _WATCH_S)[0] else b""
        if time.monotonic() >= window_end:
            if num_dropped:
                _tell(f"\n[rewards printed {num_dropped} bytes more, left out]\n".encode())
            window_end, left, num_dropped = time.monotonic() + 1.0, MOST_PRINTED, 0
        if text:
            shown = text[:left] if _tell(text[:left]) else b""
            left -= len(shown)
            num_dropped += len(text) - len(shown)
    os.killpg(0, signal.SIGKILL)


def _tell(text: bytes) -> bool:
    """Whether it could be written without waiting: who watches must not be held up by who does not read."""
    try:
        return bool(select.select([], [2], [], 0)[1]) and bool(os.write(2, text))
    except OSError:
        return False


def _serve(line: Connection, group: int, printed: int, memory_bytes: int, work: Callable[[Any], Any]) -> None:
    """A worker's whole life."""
    _enlist(group, printed, memory_bytes)
    pid = os.getpid()
    while True:
        item = line.recv()
        outcome = work(item)
        if os.getpid() != pid:
            os._exit(0)  # a child that the job forked and let return: it must not go on as a worker
        line.send(outcome)


def _enlist(group: int, printed: int, memory_bytes: int) -> None:
    try:
        os.setpgid(0, group)
    except (PermissionError, ProcessLookupError):
        os._exit(0)  # no such group any more: the crew is being stopped
    pid = os.getpid()

    def stay(number: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a child that a job forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stay)  # not SIG_IGN, which programs that a job starts would inherit
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    if sys.platform == "linux":
        _limit(memory_bytes)


def _limit(memory_bytes: int) -> None:
    """Soft limits: a reward that knows what it needs may raise them."""
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
