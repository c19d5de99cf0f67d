"""Send metrics.jsonl to a logger in a background thread, so that no step waits for it.

    loggers/NAME.json    the remote run's id and how many steps it has; written after the steps are sent

The thread reads metrics.jsonl and sends the lines that the remote run does not have: after each step, and all
earlier ones if the logger was added later, the network was down, or the process was killed. A failure is
reported once, and the logger is opened again every retry_s seconds until the run ends. Steps that were sent
before a kill but are not yet in NAME.json are sent twice.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qerl.errors import redact
from qerl.tracking.atomic_file import encode, parse_object, write_atomic
from qerl.tracking.json_lines import decode
from qerl.tracking.loggers import Logger
from qerl.tracking.metric_text import is_timing


class AsyncLogger:
    """Call wake() after each step, then end() and join(); notices() are messages for the user."""

    def __init__(
        self,
        name: str,
        make: type[Logger],
        folder: Path,
        config: dict[str, Any],
        *,
        first_step: int,
        retry_s: float = 60.0,
    ):
        """first_step: the first step that this process takes."""
        self.name, self._make, self._folder, self._config = name, make, folder, config
        self._first_step, self._retry_s, self._retry_at = first_step, retry_s, 0.0
        self._state_path = _state_path(folder, name)
        self._logger: Logger | None = None
        self._next_step = self._position = 0
        self._is_failing = self._is_closing = False
        self._result: Mapping[str, Any] | None = None
        self._notices: deque[str] = deque()
        self._wake_event = threading.Event()
        self.wake = self._wake_event.set
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def notices(self) -> list[str]:
        """Return the messages since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Start to close: send the remaining steps, then the result of a complete run."""
        self._result, self._is_closing = result, True
        self.wake()

    def join(self, timeout_s: float) -> None:
        """Wait at most timeout_s for end() to finish."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            what_to_do = "run the same command again to send the rest"
            self._notices.append(f"{self.name} does not have all steps yet; {what_to_do}")

    def _run(self) -> None:
        while True:
            self._wake_event.wait()
            self._wake_event.clear()
            is_last = self._is_closing
            if is_last or time.monotonic() >= self._retry_at:
                try:
                    self._send(is_last)
                except Exception as error:  # any failure of the network, the service or the package
                    self._fail(error)
            if is_last:
                return

    def _send(self, is_last: bool) -> None:
        if self._logger is None:
            self._logger = self._open()
        logger, first_step = self._logger, self._next_step
        try:
            with open(self._folder / "metrics.jsonl", "rb") as file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._log(logger, decode(line) or {})
                    self._position += len(line)
        finally:
            if self._next_step > first_step:
                self._write_state(logger)
        if self._is_failing:
            self._is_failing = False
            self._notices.append(f"{self.name} works again and has all {self._next_step} steps")
        if is_last:
            logger.finish(self._result)

    def _open(self) -> Logger:
        run_id, num_sent = _read_state(self._state_path)
        first_step = min(num_sent, self._first_step) if self._make.can_rewind else num_sent
        # Steps that this process has sent already need not be sent again.
        first_step = max(first_step, self._next_step)
        logger = self._make(self._folder, self._config, run_id=run_id, first_step=first_step)
        self._next_step, self._position = logger.first_step, 0
        if run_id != logger.run_id:
            self._write_state(logger)
        return logger

    def _log(self, logger: Logger, record: dict[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int) or step < self._next_step:
            return
        numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        values = {f"{'timing' if is_timing(k) else 'metric'}/{k}": v for k, v in numbers.items()}
        logger.log(step, values, record.get("wall_time", time.time()))
        self._next_step = step + 1

    def _write_state(self, logger: Logger) -> None:
        self._state_path.parent.mkdir(exist_ok=True)
        write_atomic(self._state_path, encode({"run": logger.run_id, "steps": self._next_step}))

    def _fail(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._notices.append(f"{self.name} failed and will be retried: {redact(reason)[:300]}")
        self._retry_at = time.monotonic() + self._retry_s
        failed, self._logger = self._logger, None
        if failed is not None:
            with suppress(Exception):
                failed.finish(None)


def num_sent(folder: Path, name: str) -> int:
    """Return how many steps of the run the logger has."""
    return _read_state(_state_path(folder, name))[1]


def _read_state(path: Path) -> tuple[str | None, int]:
    """Return the remote run's id, if there is one, and how many steps it has."""
    state = (parse_object(path.read_bytes()) if path.exists() else None) or {}
    run_id, num_steps = state.get("run"), state.get("steps")
    return (run_id, num_steps) if isinstance(run_id, str) and isinstance(num_steps, int) else (None, 0)


def _state_path(folder: Path, name: str) -> Path:
    return folder / "loggers" / f"{name}.json"
