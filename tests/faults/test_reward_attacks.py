"""Rewards that signal, write, stop and overflow: none of it reaches the run, and few of it another sample."""

import faulthandler
import math
import os
import re
import resource
import signal
import stat
import struct
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import tiny_run
from faults import runs
from material import group
from qerl.algo.advantage import ADVANTAGES
from qerl.config import TaskConfig
from qerl.tasks import RewardPool
from qerl.tasks.reward import format_failures
from qerl.tasks.scoring import MAX_REWARD, Failure, finite_number
from qerl.tasks.worker_pool import WorkerLost, WorkerPool

RUN = os.getpid()
STOP = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH, signal.SIGPIPE, signal.SIGXFSZ}
HARMLESS |= {signal.SIGINT, signal.SIGTERM}  # workers leave them to the run
REAL_TIME = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
ENDING = [*sorted(signal.valid_signals() - STOP - HARMLESS - set(REAL_TIME)), *REAL_TIME[:2], REAL_TIME[-1]]


@pytest.fixture
def pool():
    started = []

    def start(work, num_workers=2):
        started.append(WorkerPool(work, num_workers=num_workers))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def causes(outcomes):
    return [outcome.cause if isinstance(outcome, WorkerLost) else outcome for outcome in outcomes]


def test_a_reward_that_any_signal_ends_costs_its_own_sample(pool):
    def work(number):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        if number not in (0, signal.SIGKILL):
            signal.signal(number, signal.SIG_DFL)  # a process started in the background ignores some
        return os.kill(os.getpid(), number) if number else "fine"

    items = [item for number in ENDING for item in (int(number), 0)]
    outcomes = pool(work).run(items, deadline_s=60)
    assert causes(outcomes) == ["died", "fine"] * len(ENDING)
    told = {number: outcome.message for number, outcome in zip(items, outcomes, strict=True) if number}
    assert told[signal.SIGKILL] == "its process was killed by SIGKILL"
    assert told[REAL_TIME[1]] == f"its process was killed by signal {REAL_TIME[1]}"  # it has no name


def test_a_signal_to_the_parent_does_not_reach_the_run(pool):
    def work(number):
        if os.getppid() == RUN:
            return "the run is its parent"
        os.kill(os.getppid(), number)
        time.sleep(0.05 if number != signal.SIGKILL else 5)  # a busy machine takes its time to end the parent
        return "fine"

    ignored = sorted(signal.valid_signals() - {signal.SIGKILL})
    one = pool(work)
    assert causes(one.run(list(map(int, ignored)), deadline_s=60)) == ["fine"] * len(ignored)
    assert causes(one.run([signal.SIGKILL], deadline_s=60)) == ["died"]
    assert causes(one.run([0, 0, 0], deadline_s=60)) == ["fine"] * 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_process_group_reaches_no_other_sample(pool, number):
    def work(item):
        if item != "kills":
            time.sleep(0.3)
        elif os.getpgrp() == os.getpgid(RUN):
            return "the run's group"
        else:
            os.killpg(0, number)
        return item

    one = pool(work)
    outcomes = causes(one.run(["a", "kills", "b", "kills", "c"], deadline_s=60))
    killed = "kills" if number == signal.SIGTERM else "died"
    assert outcomes == ["a", killed, "b", killed, "c"]


def write_to_sockets(data):
    """Into each socket that the process has, its own end of the pool's among them."""
    for fd in range(3, 128):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, data)
        except OSError:
            pass


@pytest.mark.parametrize(
    "data", [b"hello, world\n", struct.pack(">Q", 5) + b"hello", struct.pack(">Q", 1 << 40), b"x"], ids=repr
)
def test_what_a_reward_writes_to_the_pools_socket_is_not_waited_for(pool, data):
    def work(item):
        if item == "writes":
            write_to_sockets(data)
        return item

    begin = time.monotonic()
    one = pool(work)
    assert causes(one.run([0, "writes", 1, 2], deadline_s=60)) == [0, "no outcome", 1, 2]
    assert causes(one.run([3, 4], deadline_s=60)) == [3, 4] and time.monotonic() - begin < 30


def test_a_reward_that_closes_all_files_costs_its_own_sample(pool):
    def work(item):
        if item == "closes":
            os.closerange(0, 51)
        return item

    one = pool(work)
    assert causes(one.run([0, "closes", 1, 2], deadline_s=60)) == [0, "ended its process", 1, 2]


def test_a_worker_that_a_reward_has_stopped_is_given_up_after_the_deadline(pool):
    def work(item):
        if item == "stops":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return len(item)

    one = pool(work, num_workers=1)
    assert one.run(["stops"], deadline_s=60) == [5]
    time.sleep(1.0)
    large = bytes(50_000_000)  # more than a socket holds: sending it must not wait for the worker
    assert causes(one.run([large], deadline_s=1.0)) == ["over the deadline"]
    assert one.run([large], deadline_s=60) == [len(large)]


def test_a_timer_that_a_reward_left_behind_ends_no_other_sample(pool):
    def work(item):
        if item == "sets":
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            time.sleep(0.5)
        return item

    assert causes(pool(work, num_workers=1).run(["sets", "sleeps"], deadline_s=60)) == ["sets", "sleeps"]


class Raising:
    def __repr__(self):
        return "raising"

    def __float__(self):
        raise RuntimeError("no number today")


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        *((value, "too large") for value in (1e308, -1e308, 1.01 * MAX_REWARD, np.float64(1e308))),
        *((value, "too large") for value in (10**31, 10**400, -(10**400), Fraction(10**400))),
        *(
            (value, "not finite")
            for value in (math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("1e400"))
        ),
        *((value, "not a number") for value in ("1", b"1", bytearray(b"1"), 1j, [1.0], Raising(), object)),
        *((value, "not a number") for value in (np.str_("1"), np.ones(2), torch.ones(2), Decimal("sNaN"))),
    ],
    ids=repr,
)
def test_a_value_that_cannot_be_added_up_is_a_failure(value, cause):
    outcome = finite_number("f", value)
    assert isinstance(outcome, Failure) and outcome.cause == cause


@pytest.mark.parametrize(
    "value", [True, 1, np.float32(1), np.int64(1), np.bool_(True), Decimal(1), Fraction(1), torch.tensor(1.0)]
)
def test_any_number_is_one(value):
    number = finite_number("f", value)
    assert type(number) is float and number == 1.0


def test_a_weighted_sum_over_the_limit_is_a_failure():
    def most(completions):
        return [MAX_REWARD * (completions[0] != "none")]

    weights = {"rewards": ("a", "b"), "reward_weights": (1.0, 0.5)}
    with RewardPool(TaskConfig(**weights), [most, most]) as rewards:
        assert rewards.attempt([group("all", "none")]) == [[None, 0.0]]
        assert list(rewards.take_failures()) == ["too large"]


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"beta"}))
def test_advantages_of_the_largest_rewards_are_finite_in_fp32(name):
    rewards_P_G = [[MAX_REWARD, -MAX_REWARD, None, 0.0], [MAX_REWARD] * 64, [MAX_REWARD, -MAX_REWARD] * 32]
    for advantages_G in ADVANTAGES[name](rewards_P_G):
        assert torch.tensor(advantages_G, dtype=torch.float32).isfinite().all()


def test_a_failure_that_quotes_half_a_surrogate_pair_can_be_printed():
    def fails(completions):
        raise ValueError("\ud83d")

    with RewardPool(TaskConfig(), [fails]) as rewards:
        rewards.attempt([group("x")])
        (line,) = format_failures(rewards.take_failures())
    assert line.encode() and "raised ValueError: fails: " in line


ATTACKS = """
import os, signal, stat, time

def write_to_sockets():
    for fd in range(3, 128):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, b"hello, world")
        except OSError:
            pass
    return [0.0]

def fails(text):
    raise ValueError(text)

def attack(prompts, completions, completion_ids, **_):
    ways = {
        0: lambda: os.kill(os.getppid(), signal.SIGTERM) or [0.0],
        1: lambda: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(60),
        2: lambda: os.kill(0, signal.SIGKILL),
        3: lambda: os.kill(os.getpid(), signal.SIGRTMIN + 3),
        4: lambda: [1e308],
        5: write_to_sockets,
        6: lambda: fails("\\\\ud83d"),
        7: lambda: signal.alarm(1) or [1.0],
    }
    key = (sum(completion_ids[0]) + sum(map(ord, str(prompts[0])))) % 16
    return ways.get(key, lambda: [float(key % 2)])()
"""
TOLD = {"died", "too large", "no outcome", "raised ValueError"}


def test_a_run_with_rewards_that_attack_it_takes_all_its_steps(tmp_path):
    files = tiny_run.write_files(tmp_path)
    (tmp_path / "attack.py").write_text(ATTACKS)
    run = runs.start(
        files,
        tmp_path / "run",
        *("--task.rewards", f"{tmp_path / 'attack.py'}:attack", "--task.reward-timeout-s", "20"),
        *("--num-steps", "4", "--evaluate.num-prompts", "0"),
    )
    assert run.wait() == 0, run.said
    assert all(re.search(f"no reward for .* samples?: {cause}: ", run.said) for cause in TOLD), run.said
    assert runs.num_steps(tmp_path / "run") == 4
    run.wait_for_all()
