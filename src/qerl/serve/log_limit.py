"""Let a log line through once per period: a client that can cause a line must not be able to fill a disk."""

import copy
import logging
import math
import time
from typing import Any

import uvicorn.config

_PERIOD_S = 10.0
_MAX_KINDS = 1000


class OncePerPeriod(logging.Filter):
    """Passes one record of each kind per period, with the number of those left out since the last.

    Records are of one kind if their templates' first lines and their exceptions' types are equal."""

    def __init__(self, period_s: float = _PERIOD_S):
        super().__init__()
        self._period_s = period_s
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        """The time at which each kind was last passed, and the number left out since."""

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, error = time.monotonic(), record.exc_info[0] if record.exc_info else None
        kind = str(record.msg).partition("\n")[0], "" if error is None else error.__name__
        last_s, num_left_out = self._seen.get(kind, (-math.inf, 0))
        if now_s - last_s < self._period_s:
            self._seen[kind] = last_s, num_left_out + 1
            return False
        if len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        self._seen[kind] = now_s, 0
        if num_left_out:
            record.msg = f"{record.getMessage().rstrip()} ({num_left_out} more like it were left out)"
            record.args = ()
        return True


def log_config() -> dict[str, Any]:
    """Return uvicorn's logging, and asyncio's, through one handler with OncePerPeriod."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["filters"] = {"once_per_period": {"()": OncePerPeriod}}
    config["handlers"]["default"]["filters"] = ["once_per_period"]
    config["loggers"]["asyncio"] = {"handlers": ["default"], "level": "WARNING"}
    return config
