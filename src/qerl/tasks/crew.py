"""Processes that do one job at a time and may be killed: `pebble`'s pool, and what it leaves open.

    parent --+-- warden      leads a process group; kills the whole group once the parent is gone
             +-- worker      in the warden's group, as is whatever a worker starts
             +-- worker

Workers are forked, so that a closure or a notebook's function needs no pickling; only items and outcomes
travel. They do not see Ctrl-C: pebble ignores SIGINT in them, and a terminal signals its own group only.
Stopping kills the group, and so a child that a job left behind.

pebble's pool breaks when an idle worker dies; it is then made anew, and what was not done is done again. It
is also made anew after any other loss of a worker, here and not in pebble's thread some time later, so that
forking happens while the caller waits and not in the midst of its own work.
"""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch
from pebble import ProcessExpired, ProcessPool

_MAX_ATTEMPTS = 3
_WATCH_S = 0.5


class Lost(Exception):
    """A job that came to no end: `Lost("died", "exit code -11")`, `Lost("over the deadline", "10 s")`."""

    def __init__(self, cause: str, message: str):
        super().__init__(cause, message)
        self.cause, self.message = cause, message


class Crew:
    """Runs `work(item)` for many items, num_workers at a time. Items and outcomes must be picklable."""

    def __init__(self, work: Callable[[Any], Any], *, num_workers: int):
        self._work, self._num_workers = work, num_workers
        self._start()

    def run(self, items: list[Any], *, deadline_s: float) -> list[Any]:
        """The outcome of each item in order; Lost for one that took longer or whose worker died."""
        outcomes: list[Any] = [None] * len(items)
        waiting = list(range(len(items)))
        with _forking():
            for _ in range(_MAX_ATTEMPTS):
                waiting = self._attempt(items, outcomes, waiting, deadline_s)
                if waiting or any(isinstance(outcome, Lost) for outcome in outcomes):
                    self.stop()
                    self._start()
                if not waiting:
                    break
        for i in waiting:
            outcomes[i] = Lost("died", "the workers died again and again")
        return outcomes

    def _attempt(
        self, items: list[Any], outcomes: list[Any], waiting: list[int], deadline_s: float
    ) -> list[int]:
        """Fills in outcomes; gives the items that a broken pool has left undone."""
        undone, futures = [], {}
        for i in waiting:
            try:
                futures[i] = self._pool.schedule(_work_on, args=(items[i],), timeout=deadline_s)
            except RuntimeError:  # BrokenProcessPool is one; this is how it is said of a pool broken before
                undone.append(i)
        for i, future in futures.items():
            try:
                outcomes[i] = future.result()
            except TimeoutError:
                outcomes[i] = Lost("over the deadline", f"not done after {deadline_s:g} s")
            except ProcessExpired as error:
                outcomes[i] = Lost("died", f"the process ended with exit code {error.exitcode}")
            except BrokenProcessPool:
                undone.append(i)
        return undone

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        with _forking():
            self._warden = context.Process(target=_guard, args=(os.getpid(),), daemon=True)
            self._warden.start()
            assert self._warden.pid is not None
            self._group = self._warden.pid
            os.setpgid(self._group, self._group)  # the warden does it too: whoever is first
            self._pool = ProcessPool(
                self._num_workers,
                initializer=_enlist,
                initargs=(self._group, self._work),
                context=context,
            )
            self._pool.schedule(os.getpid).result()  # pebble forks at the first job; here, and not later

    def stop(self) -> None:
        """Ends the processes and all that they have started, without waiting for jobs."""
        self._pool.stop()
        if self._warden.is_alive():
            os.killpg(self._group, signal.SIGKILL)
        self._pool.join()
        self._warden.join()


@contextmanager
def _forking() -> Iterator[None]:
    """Python 3.12 warns of any fork beside threads; the workers take up none of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        yield


def _guard(parent: int) -> None:
    """The warden's whole life. It polls, which works on every Unix and whichever thread has forked it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.killpg(0, signal.SIGKILL)


_work: Callable[[Any], Any] | None = None  # set in a worker only: pebble pickles what it is given for a job


def _enlist(group: int, work: Callable[[Any], Any]) -> None:
    global _work
    try:
        os.setpgid(0, group)
    except (PermissionError, ProcessLookupError):
        os._exit(0)  # no such group any more: pebble has made a worker anew while the crew is being stopped
    # pebble would run exit handlers, and wait 3 s for a job that does not come back to Python.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _work = work


def _work_on(item: Any) -> Any:
    assert _work is not None
    pid = os.getpid()
    outcome = _work(item)
    if os.getpid() != pid:
        os._exit(0)  # a child that the job forked and let return: it must not go on as a worker
    return outcome
