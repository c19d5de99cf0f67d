"""Move what Python has allocated into pages of 2 MB (Linux 6.1 and later; elsewhere nothing happens).

The suite forks thousands of times, and a fork copies an entry for each page: in pages of 4 KB it takes twice
as long. A fork also splits the pages that are written afterwards, so they are made again after many forks.
"""

import ctypes
import os
import sys
from pathlib import Path

HUGE = 2 << 20
MADV_COLLAPSE = 25
MANY_FORKS = 100

_num_forks: int | None = None
"""Since the pages were made; None: they were not."""


def keep() -> None:
    """Make them, and let renew() make them again."""
    os.register_at_fork(after_in_parent=_count)
    _make()


def renew() -> None:
    """Make them again if there have been many forks."""
    if _num_forks is not None and _num_forks >= MANY_FORKS:
        _make()


def _count() -> None:
    global _num_forks
    _num_forks = (_num_forks or 0) + 1


def _make() -> None:
    global _num_forks
    _num_forks = 0
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, flags, _, _, _, *name = line.split(maxsplit=5)
        if flags != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in area.split("-"))
        for address in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
            advise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), MADV_COLLAPSE)
