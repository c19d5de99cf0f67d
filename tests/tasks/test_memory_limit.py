"""The limit of a worker's memory counts memory, not the addresses that malloc and threads reserve."""

import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qerl.tasks import memory_limit
from qerl.tasks.worker_pool import WorkerLost, WorkerPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is of Linux")
MB = 1 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@pytest.fixture
def pool():
    """pool(work, MB) starts one; it is stopped after the test."""
    started = []

    def start(work, num_mb):
        started.append(WorkerPool(work, num_workers=1, memory_bytes=num_mb * MB))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def reserve(num_mb):
    """Reserve addresses as malloc does for an arena, and take a megabyte of memory."""
    held = mmap.mmap(-1, num_mb * MB, flags=PRIVATE, prot=0)
    return len(held) // MB + len(bytearray(MB)) // MB


def allocate(num_mb):
    try:
        return len(bytearray(num_mb * MB)) // MB
    except MemoryError:
        return "MemoryError"


def share(num_mb):
    """Hold shared memory, which another process could use as well."""
    with mmap.mmap(-1, num_mb * MB) as held:
        for start in range(0, num_mb * MB, MB):
            held[start : start + MB] = b"x" * MB
        time.sleep(0 if num_mb < 100 else 30)
    return num_mb


def test_reserved_addresses_are_no_memory(pool):
    assert pool(reserve, 100).run([4096], deadline_s=60) == [4097]


def test_more_private_memory_raises_memory_error_and_its_worker_goes_on(pool):
    def work(num_mb):
        return allocate(num_mb), os.getpid()

    (small, pid), (large, same), (again, still) = pool(work, 300).run([200, 400, 200], deadline_s=60)
    assert (small, large, again) == (200, "MemoryError", 200) and pid == same == still


def test_more_shared_memory_costs_its_job_alone(pool):
    first, large, again = pool(share, 200).run([50, 1000, 50], deadline_s=60)
    assert (first, again) == (50, 50)
    assert isinstance(large, WorkerLost) and large.cause == "took too much memory"
    assert re.search(r"had more than [\d.]+ GB", large.message)


def test_what_the_pool_has_reserved_is_no_room_for_its_workers(pool):
    with mmap.mmap(-1, 4096 * MB, flags=PRIVATE):
        first, large = pool(share, 200).run([50, 1000], deadline_s=60)
    assert first == 50 and isinstance(large, WorkerLost)


def test_a_job_that_names_itself_like_a_size_is_watched_as_others(pool):
    def work(item):
        Path("/proc/self/comm").write_text("VmData: 1 kB")
        time.sleep(1.2)
        return share(item)

    assert pool(work, 200).run([50], deadline_s=60) == [50]


def test_where_the_kernel_does_not_limit_memory_addresses_are_limited(pool, monkeypatch):
    monkeypatch.setattr(memory_limit, "_limits_data", lambda: False)
    one = pool(lambda num_mb: allocate(num_mb), 300)
    assert one.run([200, 400, 200], deadline_s=60) == [200, "MemoryError", 200]


MANY_THREADS = """
import asyncio, re, time
from pathlib import Path
from qerl.tasks.event_loop import GuardedLoop
from qerl.tasks.memory_limit import stack_bytes
from qerl.tasks.worker_pool import WorkerPool

NUM = 128
loop = GuardedLoop(max_concurrent=NUM, deadline_s=60.0)

def tool():
    held = [bytes(1000) for _ in range(200)]
    time.sleep(2.0)
    return len(held)

async def episode():
    return await asyncio.to_thread(tool)

def mapped_mb():
    return int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

def work(item):
    before = mapped_mb()
    ended = loop.run([("episode", episode)] * NUM)
    failed = sorted({str(each) for each in ended if each != 200})
    return len(failed), mapped_mb() - before, failed[:1]

pool = WorkerPool(work, num_workers=1, memory_bytes=(500 << 20) + stack_bytes(NUM))
try:
    for failed, grown, reason in pool.run([1, 2], deadline_s=120.0):
        print(failed, grown, stack_bytes(NUM) >> 20, *reason)
finally:
    pool.stop()
"""


def test_threads_of_many_episodes_have_place_on_a_host_with_many_cores():
    """128 tools in threads at once, twice. glibc makes 256 arenas on 32 cores, of 64 MiB each."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS],
        env={**os.environ, "MALLOC_ARENA_MAX": "256"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (line.split(maxsplit=3) for line in done.stdout.splitlines())
    assert first[0] == second[0] == "0", done.stdout
    stacks, grown, grown_again = map(int, (first[2], first[1], second[1]))
    assert grown < stacks + 10 * 64 and grown_again < 64, done.stdout  # MB: eight arenas, none later
