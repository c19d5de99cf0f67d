"""Limit the memory of a process, not the addresses that it reserves.

    RLIMIT_DATA   private writable memory: what asks for more gets MemoryError and may go on
    watched       memory in use, shared memory too: a keeper kills its worker (worker_process.py)

Reserved addresses grow with cores and threads: glibc makes up to eight arenas of malloc for a core, each
reserves 64 MiB, so that 257 threads with 0.28 GB in use took 3.8 GB of addresses on 2 cores and more than
8 GB on 32 (tests/tasks/test_memory_limit.py). There are few arenas also because each keeps what it once had.
The stacks of threads count in full, used or not.
"""

import contextlib
import ctypes
import mmap
import os
import resource
from pathlib import Path

_M_ARENA_MAX, _MAX_ARENAS = -8, 8  # of mallopt
_STACK_BYTES = 8 << 20  # of a thread, where the limit of stacks is not a number
_PROBE_BYTES = 32 << 20


def limit_memory(num_bytes: int) -> None:
    """Let this process have this much more private memory, by a soft limit, and be killed first if the
    machine's runs out. Where the kernel does not limit memory, address space is limited."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(AttributeError):  # C libraries without arenas
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _MAX_ARENAS)
    if _limits_data():
        limit_softly(resource.RLIMIT_DATA, _data_bytes() + num_bytes)
    else:
        mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit_softly(resource.RLIMIT_AS, mapped_bytes + num_bytes)


def _limits_data() -> bool:
    """True if RLIMIT_DATA limits private mappings: in Linux from 4.7 on, but not in every sandbox."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    limit_softly(resource.RLIMIT_DATA, _data_bytes() + _PROBE_BYTES)
    try:
        mmap.mmap(-1, 2 * _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return False


def stack_bytes(num_threads: int) -> int:
    """Return the bytes that the stacks of this many threads reserve, whether they use them or not."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return num_threads * (_STACK_BYTES if soft == resource.RLIM_INFINITY else soft)


def _data_bytes() -> int:
    """Return the bytes of this process's private memory, used or not, as RLIMIT_DATA counts them."""
    return _status_bytes(os.getpid()).get("VmData", 0)


def resident_bytes(pid: int) -> int:
    """Return the bytes of a process's memory, private and shared, that is in use and not from files."""
    sizes = _status_bytes(pid)
    return sizes["RssAnon"] + sizes["RssShmem"] if "RssShmem" in sizes else sizes.get("VmRSS", 0)


def _status_bytes(pid: int) -> dict[str, int]:
    """Return the sizes of /proc/PID/status by name; none of a process that has ended, or elsewhere."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines if line.startswith(("Vm", "Rss")))
    return {name.rstrip(":"): 1024 * int(size) for name, size, _ in parts}


def limit_softly(kind: int, limit: int) -> None:
    """Set a soft limit: a reward may raise it."""
    soft, hard = resource.getrlimit(kind)
    known = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([limit, *known]), hard))
