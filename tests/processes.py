"""The machine's processes, from /proc. One that has ended and only waits to be reaped does not run."""

import time
from collections.abc import Callable
from pathlib import Path

PARENT, SESSION = 1, 3


def all_running() -> dict[int, list[str]]:
    """The fields of each process that runs by its id, as stat_of."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: fields for pid in pids if (fields := stat_of(pid)) is not None}


def stat_of(pid: int) -> list[str] | None:
    """Its fields of /proc/PID/stat behind the name: state, PARENT, ...; None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it is gone, perhaps between opening and reading
        return None
    return None if fields[0] in ("Z", "X") else fields


def is_running(pid: int) -> bool:
    return stat_of(pid) is not None


def comes_true(holds: Callable[[], bool], within_s: float = 5.0) -> bool:
    """True as soon as it holds; False if it does not within these seconds."""
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def has_ended(pid: int, within_s: float = 30.0) -> bool:
    """True as soon as it does not run."""
    return comes_true(lambda: not is_running(pid), within_s)
