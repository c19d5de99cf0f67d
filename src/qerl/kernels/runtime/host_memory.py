"""The host memory that this process may still take."""

import math
import os
from pathlib import Path

_SHARE = 0.85
_ROOT = Path("/")


def usable_host_bytes(root: Path = _ROOT) -> float:
    """Return what of the free memory, or of the container's limit, one of this host's ranks may take; inf
    if neither is known. root: of the files of /proc and /sys."""
    free = min(_free_bytes(root), _container_bytes(root))
    return _SHARE * free / max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def _free_bytes(root: Path) -> float:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return 1024 * float(rest.split()[0])
    return math.inf


def _container_bytes(root: Path) -> float:
    """Return the limit less what is in use, of which file pages that can be dropped do not count."""
    folder = root / "sys/fs/cgroup"
    limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return math.inf
    pages = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return max(int(limit) - int(used) + int(pages.get("inactive_file", 0)), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
