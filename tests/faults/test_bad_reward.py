"""Rewards that eat, fork, print, hang, leave and lie: each costs its own sample and nobody else."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import tiny_run
from faults import runs
from material import group
from processes import has_ended
from qerl.config import TaskConfig
from qerl.tasks import RewardPool
from qerl.tasks.worker_pool import WorkerLost, WorkerPool
from qerl.tasks.worker_process import MAX_PRINTED, MORE_TASKS

BAD = """
import os, pathlib, signal, time

LOG = pathlib.Path(__file__).with_name("calls")

def bad(prompts, completions, completion_ids, **_):
    with LOG.open("ab") as log:
        log.write(b"x")
    number = LOG.stat().st_size  # of the call: which samples a run draws depends on their rewards
    ways = {
        0: lambda: os._exit(0),
        1: lambda: [float("nan")],
        2: lambda: [1 / 0],
        3: lambda: [bytearray(1 << 33)],
        4: lambda: os.kill(os.getpid(), signal.SIGKILL),
        6: lambda: os.closerange(3, 100),
    }
    if number == 9:
        return [os.fork(), time.sleep(60)]
    return ways.get(number % 8, lambda: [float(number % 2)])()
"""
CAUSES = {"ended its process", "not finite", "raised ZeroDivisionError", "raised MemoryError", "died"}


@pytest.fixture
def pool():
    started = []

    def start(function, **fields):
        started.append(RewardPool(TaskConfig(**fields), [function]))
        return started[-1]

    yield start
    for one in started:
        one.close()


def scored(pool, *texts):
    return pool.score([group(*texts, answer="1")])[0]


def test_a_reward_that_eats_memory_gets_an_error_and_not_the_machine(pool):
    def eats(completions):
        held = []
        while completions == ["all"]:
            held.append(bytearray(1 << 26))
        return [1.0]

    one = pool(eats, reward_memory_gb=0.5, reward_timeout_s=30.0)
    assert scored(one, "all", "none", "all") == [None, 1.0, None]
    assert one.take_failures()["raised MemoryError"][0] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's choice is told through /proc")
def test_where_memory_is_short_the_kernel_ends_a_reward_first(pool):
    def first(completions):
        with open("/proc/self/oom_score_adj") as file:
            return [float(file.read())]

    assert scored(pool(first), "x") == [1000.0]


@pytest.mark.parametrize("ends", [True, False])
def test_children_of_a_reward_go_with_it(pool, tmp_path, ends):
    def forks(completions):
        for _ in range(20):
            if os.fork() == 0:
                (tmp_path / str(os.getpid())).touch()
                time.sleep(600)
        return [1.0] if ends else time.sleep(600)

    one = pool(forks, reward_timeout_s=30.0 if ends else 2.0, reward_workers=1)
    if ends:
        assert scored(one, "x") == [1.0]
        one.close()
    else:
        with pytest.raises(Exception, match="over the deadline"):
            scored(one, "x")
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert pids and all(has_ended(pid, within_s=5) for pid in pids)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root, whom the limit does not bind, can become another")
def test_tasks_that_a_reward_adds_are_limited():
    def adds(item):
        os.setuid(65534)
        threading.stack_size(1 << 16)
        for count in range(4 * MORE_TASKS):
            try:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            except RuntimeError:
                return count
        return None

    pool = WorkerPool(adds, num_workers=1)
    try:
        (count,) = pool.run([0], deadline_s=60)
    finally:
        pool.stop()
    assert isinstance(count, int) and MORE_TASKS / 2 < count < 2 * MORE_TASKS


def test_a_quarter_gigabyte_of_print_does_not_reach_the_terminal(pool, capfd):
    def prints(completions):
        print("one line that is wanted")
        for _ in range(1 << 12):
            os.write(1, b"x" * (1 << 16))
        return [1.0]

    begin = time.monotonic()
    one = pool(prints, reward_timeout_s=120.0, reward_workers=1)
    assert scored(one, "x") == [1.0]
    seconds = time.monotonic() - begin
    time.sleep(1.6)  # what was left out is told in the second after
    one.close()
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("one line that is wanted\n")
    assert "more bytes printed by rewards" in said.err
    assert len(said.err) < (seconds + 3) * (MAX_PRINTED + 100)


def test_what_ends_one_sample_in_any_way_leaves_the_run_and_is_told(tmp_path):
    files = tiny_run.write_files(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    run = runs.start(
        files,
        tmp_path / "run",
        *("--task.rewards", f"{tmp_path / 'bad.py'}:bad", "--task.reward-timeout-s", "4"),
        *("--task.reward-memory-gb", "1", "--num-steps", "3", "--evaluate.num-prompts", "0"),
    )
    assert run.wait() == 0, run.said
    assert all(re.search(f"no reward for .* samples?: {cause}: ", run.said) for cause in CAUSES), run.said
    assert runs.num_steps(tmp_path / "run") == 3
    run.wait_for_all()


def test_the_deadline_is_kept_whatever_the_clock_says(monkeypatch):
    """The wall clock leaps a day ahead and back at each look; deadlines are by another clock."""
    real, looks = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + 86400 * (-1) ** next(looks))
    pool = WorkerPool(lambda item: time.sleep(item), num_workers=2)
    begin = time.monotonic()
    try:
        outcomes = pool.run([0.3, 600, 0.3], deadline_s=1.5)
    finally:
        pool.stop()
    assert [getattr(one, "cause", None) for one in outcomes] == [None, "over the deadline", None]
    assert 1.4 < time.monotonic() - begin < 6


def test_a_pool_that_was_interrupted_gives_no_outcome_of_before(monkeypatch):
    pool = WorkerPool(lambda item: (time.sleep(0.5), item)[1], num_workers=2)

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            pool.run([1, 2], deadline_s=5)
        assert pool.run([3], deadline_s=5) == [3]
    finally:
        signal.signal(signal.SIGALRM, previous)
        pool.stop()


def test_where_no_process_can_be_had_for_a_lost_one_the_others_do_the_work(monkeypatch):
    pool = WorkerPool(lambda item: os._exit(0) if item == 1 else item, num_workers=2)
    fork, failed = os.fork, []

    def refused():
        if not failed:
            failed.append(True)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refused)
    try:
        outcomes = pool.run([0, 1, 2, 3, 1, 4], deadline_s=5)
    finally:
        pool.stop()
    assert failed and [getattr(one, "cause", one) for one in outcomes] == [
        *(0, "ended its process", 2, 3, "ended its process", 4)
    ]
    assert isinstance(outcomes[1], WorkerLost)


def test_a_program_that_a_reward_starts_can_be_terminated(pool, tmp_path):
    """Workers do not heed SIGTERM; what they start must."""

    def starts(completions):
        child = subprocess.Popen(["sleep", "600"])
        child.terminate()
        forked = os.fork()
        if forked == 0:
            (tmp_path / "forked").touch()
            time.sleep(600)
        while not (tmp_path / "forked").exists():
            time.sleep(0.01)
        os.kill(forked, signal.SIGTERM)
        return [float(child.wait(5) == -15 and os.waitpid(forked, 0)[1] == 15)]

    assert scored(pool(starts), "x") == [1.0]
