"""Deadlines of coroutines in one event loop, by a clock that the test sets: no load of the machine counts."""

import asyncio
import functools
import signal
import threading
import types

import pytest

from qerl.tasks import event_loop
from qerl.tasks.event_loop import GuardedLoop
from qerl.tasks.scoring import Failure


class SetClock(asyncio.SelectorEventLoop):
    """Time passes where the loop waits, by as much as it would wait, and in `pass_s`."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self._selector.select = self._wait

    def time(self):
        return self.now_s

    def pass_s(self, seconds):
        self.now_s += seconds

    def _wait(self, timeout_s):
        self.now_s += timeout_s or 0.0
        return []


@pytest.fixture
def clock(monkeypatch):
    clock = SetClock()
    runner = functools.partial(asyncio.Runner, loop_factory=lambda: clock)
    monkeypatch.setattr(event_loop.asyncio, "Runner", runner)
    monkeypatch.setattr(event_loop, "time", types.SimpleNamespace(monotonic=clock.time))
    former = signal.getsignal(signal.SIGALRM)
    yield clock
    signal.signal(signal.SIGALRM, former)
    clock.close()


def ended(*jobs):
    """What each job returned within 0.5 s of its own, or the cause of its failure."""
    loop = GuardedLoop(max_concurrent=9, deadline_s=0.5, block_s=60.0)
    results = loop.run([(str(i), job) for i, job in enumerate(jobs)])
    return [each.cause if isinstance(each, Failure) else each for each in results]


def test_time_that_another_ones_code_takes_is_not_counted(clock):
    """Each waits for 0.3 s of its own, and for two times 0.4 s of others, of 0.5 s that it has."""

    async def sleeping():
        await asyncio.sleep(0.3)
        return "slept"

    async def blocking():
        await asyncio.sleep(0)
        clock.pass_s(0.4)
        return "blocked"

    assert ended(sleeping, blocking, blocking, sleeping) == ["slept", "blocked", "blocked", "slept"]


def test_ones_own_time_is_counted_whether_code_waits_or_runs(clock):
    async def using(wait_s, run_s):
        for _ in range(4):
            clock.pass_s(run_s)
            await asyncio.sleep(wait_s)

    assert ended(lambda: using(0.2, 0.0)) == ended(lambda: using(0.0, 0.2)) == ["over the deadline"]


@pytest.mark.parametrize("others", [0.4, 0.6])
def test_time_in_a_task_that_a_job_made_is_that_jobs_alone(clock, others):
    async def running():
        clock.pass_s(others)
        await asyncio.sleep(0)

    async def waiting_for_a_task():
        await asyncio.create_task(running())
        return "done"

    async def sleeping():
        await asyncio.sleep(0.3)
        return "slept"

    first = "done" if others < 0.5 else "over the deadline"
    assert ended(waiting_for_a_task, sleeping) == [first, "slept"]


def test_threads_that_hang_take_no_places_of_a_later_run():
    """Those of rewards and environments too, whose process stays."""
    may_end, former = threading.Event(), signal.getsignal(signal.SIGALRM)
    loop = GuardedLoop(max_concurrent=1, deadline_s=0.2, block_s=60.0)

    async def hanging():
        await asyncio.gather(*(asyncio.to_thread(may_end.wait, 60) for _ in range(40)))

    async def quick():
        return await asyncio.to_thread(lambda: "done")

    try:
        (failure,) = loop.run([("hanging", hanging)])
        assert failure.cause == "over the deadline" and loop.has_busy_threads
        loop._deadline_s = 60.0
        assert loop.run([("quick", quick)]) == ["done"] and not loop.has_busy_threads
    finally:
        may_end.set()
        loop._runner.close()
        signal.signal(signal.SIGALRM, former)
