import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait

import pytest
import torch

from processes import comes_true, is_running
from qerl.tasks.worker_pool import WorkerLost, WorkerPool


@pytest.fixture
def pool():
    """pool(work) starts one; it is stopped after the test."""
    started = []

    def start(work, num_workers=2):
        started.append(WorkerPool(work, num_workers=num_workers))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def causes(outcomes):
    return [outcome.cause if isinstance(outcome, WorkerLost) else outcome for outcome in outcomes]


def test_outcomes_come_in_the_order_of_items(pool):
    def work(item):
        time.sleep(0.02 * (item % 3 == 0))
        return item * item

    assert pool(work).run(list(range(20)), deadline_s=60) == [i * i for i in range(20)]
    assert pool(work).run([], deadline_s=60) == []


def test_a_poll_waits_for_no_job_and_later_items_come_with_the_first(pool, tmp_path):
    """The first job ends only after the poll that began it has returned."""

    def work(item):
        while item == 0 and not (tmp_path / "polled").exists():
            time.sleep(0.01)
        return item * 10

    jobs = pool(work).begin(deadline_s=20)
    assert jobs.add([0, 1]) == range(2)
    jobs.poll()
    (tmp_path / "polled").touch()
    assert jobs.add([2]) == range(2, 3)
    assert jobs.wait() == [0, 10, 20] and jobs.busy_s > 0


def test_jobs_that_nobody_waited_for_are_no_later_ones_outcomes(pool, tmp_path):
    def work(item):
        (tmp_path / f"{item}").touch()
        time.sleep(60 if item < 2 else 0)
        return item

    workers = pool(work)
    given_up = workers.begin(deadline_s=100)
    given_up.add([0, 1])
    given_up.poll()
    assert comes_true(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    assert workers.run([5, 6], deadline_s=20) == [5, 6]
    with pytest.raises(AssertionError, match="another batch"):
        given_up.poll()


def test_a_closure_is_run_as_it_is_without_pickling(pool):
    lock = threading.Lock()  # cannot be pickled

    def work(item):
        with lock:
            return item + 1

    assert pool(work).run([1, 2], deadline_s=60) == [2, 3]


class Held:
    """In a cycle with itself; writes where it was freed."""

    def __init__(self, told):
        self.itself, self.told = self, told

    def __del__(self):
        os.write(self.told, str(os.getpid()).encode())


def test_a_worker_frees_no_garbage_of_the_process_it_was_forked_from(pool):
    """Which may hold graphs and memory of a GPU that the worker must not touch."""
    read, told = os.pipe()
    gc.disable()
    try:
        Held(told)
        assert pool(lambda item: gc.collect() >= 0, num_workers=1).run([1], deadline_s=60) == [True]
    finally:
        gc.enable()
        gc.collect()
    assert os.read(read, 100) == str(os.getpid()).encode()
    os.close(read)
    os.close(told)


def test_a_job_over_its_deadline_is_killed_and_the_rest_is_done(pool):
    def work(item):
        return time.sleep(60) if item == 1 else item

    start = time.monotonic()
    outcomes = pool(work).run(list(range(6)), deadline_s=1.5)
    assert causes(outcomes) == [0, "over the deadline", 2, 3, 4, 5]
    assert 1.5 <= time.monotonic() - start < 30  # not the job's 60 s


def test_a_job_that_does_not_come_back_to_python_is_killed_as_well(pool):
    def work(item):
        return sum(range(10**13)) if item == 1 else item  # hours in which no signal handler gets to run

    start = time.monotonic()
    assert causes(pool(work).run([0, 1, 2], deadline_s=1.5)) == [0, "over the deadline", 2]
    assert time.monotonic() - start < 30


def test_the_deadline_is_for_each_job_and_not_for_the_queue(pool):
    outcomes = pool(lambda item: time.sleep(0.25)).run([0] * 12, deadline_s=1.25)
    assert causes(outcomes) == [None] * 12


def segfault():
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (lambda: os._exit(3), "ended its process"),
        (lambda: os._exit(0), "ended its process"),
        (segfault, "died"),
    ],
)
def test_a_job_that_ends_its_process_costs_itself_alone(pool, end, cause):
    def work(item):
        return end() if item % 4 == 1 else item

    one = pool(work)
    for _ in range(3):
        assert causes(one.run(list(range(8)), deadline_s=60)) == [0, cause, 2, 3, 4, cause, 6, 7]


def test_a_pool_whose_idle_workers_die_goes_on(pool):
    one = pool(lambda item: os.getpid())
    pids = set(one.run([0] * 8, deadline_s=60))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert comes_true(lambda: not any(map(is_running, pids)))
    sockets = [worker.channel.socket for worker in one._workers]
    assert comes_true(lambda: len(wait(sockets, 0)) == len(sockets))  # the keepers have told
    assert all(isinstance(pid, int) for pid in one.run([0] * 8, deadline_s=60))


def test_a_forked_child_that_returns_does_not_become_a_worker(pool, tmp_path):
    def work(item):
        os.fork()
        (tmp_path / str(os.getpid())).touch()
        return item

    assert pool(work, num_workers=1).run([1, 2, 3], deadline_s=60) == [1, 2, 3]
    assert comes_true(lambda: len(list(tmp_path.iterdir())) == 4)  # the worker, and a child for each item
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert comes_true(lambda: sum(is_running(pid) for pid in pids) == 1)


def test_stopping_ends_what_jobs_have_left_behind(pool):
    def work(item):
        return subprocess.Popen(["sleep", "600"]).pid

    one = pool(work)
    left = one.run([1, 2], deadline_s=60)
    assert all(is_running(pid) for pid in left)
    start = time.monotonic()
    one.stop()
    assert time.monotonic() - start < 30  # not the 600 s of what they started
    assert comes_true(lambda: not any(is_running(pid) for pid in left))


def test_workers_compute_with_one_thread_even_after_the_parent_has_used_several(pool):
    torch.ones(512, 512) @ torch.ones(512, 512)

    def work(item):
        return torch.get_num_threads(), float((torch.ones(300, 300) @ torch.ones(300, 300))[0, 0])

    assert pool(work).run([0, 0], deadline_s=60) == [(1, 300.0)] * 2


PARENT = """
import os, signal, subprocess, sys, time
from qerl.tasks.worker_pool import WorkerPool

def work(item):
    print(os.getpid(), os.getpgrp(), subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)

pool = WorkerPool(work, num_workers=1)
try:
    pool.run([1], deadline_s=600)
except KeyboardInterrupt:
    pool.stop()
    print("stopped", flush=True)
"""


@pytest.fixture
def parent():
    """A run in its own session, as under a terminal, and the pids of worker, supervisor and grandchild."""
    command = [sys.executable, "-c", PARENT]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    yield process, pids
    process.kill()
    process.wait()
    process.stdout.close()


FORKED_AT_CTRL_C = """
import os, signal, time
from qerl.tasks.worker_process import fork_process
os.register_at_fork({when}=lambda: os.killpg(0, signal.SIGINT))
begin = signal.getsignal(signal.SIGINT)
try:
    fork_process(lambda: (time.sleep(0.5), print("the fork goes on", flush=True)))
except KeyboardInterrupt:
    print("stopped", flush=True)
assert signal.getsignal(signal.SIGINT) is begin
"""


@pytest.mark.parametrize("when", ["before", "after_in_parent"])
def test_ctrl_c_during_a_fork_stops_the_run_and_not_the_fork(when):
    """Python drops what a function that os.fork calls raises."""
    script = FORKED_AT_CTRL_C.format(when=when)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=60)
    assert (sorted(done.stdout.splitlines()), done.stderr) == (["stopped", "the fork goes on"], "")


def test_ctrl_c_reaches_the_run_alone_and_the_run_ends_its_workers(parent):
    process, pids = parent
    assert all(os.getpgid(pid) != process.pid for pid in pids)
    for pid in pids[:2]:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert all(is_running(pid) for pid in pids)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    assert process.stdout.readline() == "stopped\n"
    assert comes_true(lambda: not any(is_running(pid) for pid in pids))


def test_workers_and_what_they_started_die_with_a_parent_that_is_killed(parent):
    process, pids = parent
    process.kill()
    assert comes_true(lambda: not any(is_running(pid) for pid in pids))
