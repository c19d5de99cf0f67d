"""Read the use of this machine's GPUs from nvidia-smi; an empty list where there is none.

busy_share   share of the last second in which a kernel ran     memory_gb, memory_total_gb   1e9 bytes
"""

import subprocess
import threading
import time
from typing import Any

_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu"
_COMMAND = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
_MIB = 1 << 20


class GpuMonitor:
    """Runs nvidia-smi at most every `every_s` seconds; other calls return the last result."""

    def __init__(self, every_s: float = 2.0):
        self._every_s = every_s
        self._lock = threading.Lock()
        self._latest: list[dict[str, Any]] = []
        self._next_at = 0.0

    def now(self) -> list[dict[str, Any]]:
        if time.monotonic() >= self._next_at and self._lock.acquire(blocking=False):
            try:
                self._latest = _query()
                # Where nvidia-smi is missing or fails, retry only once a minute.
                self._next_at = time.monotonic() + (self._every_s if self._latest else 60.0)
            finally:
                self._lock.release()
        return self._latest


def _query() -> list[dict[str, Any]]:
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return [_read(line.split(",")) for line in done.stdout.splitlines() if line.count(",") == 6]


def _read(cells: list[str]) -> dict[str, Any]:
    index, name, busy, used, total, watts, celsius = (cell.strip() for cell in cells)
    return {
        "name": f"GPU {index}, {name}",
        "busy_share": _number(busy, 0.01),
        "memory_gb": _number(used, _MIB / 1e9),
        "memory_total_gb": _number(total, _MIB / 1e9),
        "watts": _number(watts, 1),
        "celsius": _number(celsius, 1),
    }


def _number(cell: str, unit: float) -> float | None:
    """Return None for [N/A]."""
    try:
        return float(cell) * unit
    except ValueError:
        return None
