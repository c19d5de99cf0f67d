"""A logger kept level with metrics.jsonl, which stays the truth, by a thread that no step waits for.

    loggers/NAME.json    the remote run's id, and how many steps it has; written after the steps are sent

The thread reads the file and sends the lines that the remote run does not have: after a step as a rule; all
that it missed where it was added late, the network was down, or the process was killed. A logger that fails
is noticed once and opened again every retry_s seconds, until the run ends. What was sent when a kill came
before NAME.json was written is sent once more; no more than the steps of one moment are.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qerl.errors import redact
from qerl.tracking.atomic_file import decode, encode, write_atomic
from qerl.tracking.loggers import Logger
from qerl.tracking.metric_text import is_timing


class AsyncLogger:
    """follow() after each step; close() at the end. Between them notices() is what the user is to be told."""

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
        """first_step: the step that this process goes on with."""
        self.name, self._make, self._folder, self._config = name, make, folder, config
        self._first_step, self._retry_s, self._retry_at = first_step, retry_s, 0.0
        self._state_path = _state_path(folder, name)
        self._logger: Logger | None = None
        self._next_step = self._position = 0
        self._is_failing = self._is_closing = False
        self._result: Mapping[str, Any] | None = None
        self._notices: deque[str] = deque()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def follow(self) -> None:
        self._wake.set()

    def notices(self) -> list[str]:
        """What happened since the last call."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Begins to close: sends what is left, then the result of a run that has ended."""
        self._result, self._is_closing = result, True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Waits for end() to be done, so long and no longer."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._notices.append(
                f"{self.name} has not taken all steps, metrics.jsonl has; the same command sends the rest"
            )

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_closing
            if is_last or time.monotonic() >= self._retry_at:
                try:
                    self._send(is_last)
                except Exception as error:  # the network, the service, the package: anything may come
                    self._fail(error)
            if is_last:
                return

    def _send(self, is_last: bool) -> None:
        if self._logger is None:
            self._logger = self._opened()
        logger, had = self._logger, self._next_step
        try:
            with open(self._folder / "metrics.jsonl", "rb") as file:
                file.seek(self._position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._log(logger, decode(line) or {})
                    self._position += len(line)
        finally:
            if self._next_step > had:
                self._store(logger)
        if self._is_failing:
            self._is_failing = False
            self._notices.append(f"{self.name} takes metrics again, and has all {self._next_step} steps")
        if is_last:
            logger.finish(self._result)

    def _opened(self) -> Logger:
        run_id, num_sent = _state(self._state_path)
        first_step = min(num_sent, self._first_step) if self._make.takes_back else num_sent
        # Where this process has sent steps already, all of them belong to the run as it is.
        first_step = max(first_step, self._next_step)
        logger = self._make(self._folder, self._config, run_id=run_id, first_step=first_step)
        self._next_step, self._position = logger.first_step, 0
        if run_id != logger.run_id:
            self._store(logger)
        return logger

    def _log(self, logger: Logger, record: dict[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int) or step < self._next_step:
            return
        values = {
            f"{'timing' if is_timing(key) else 'metric'}/{key}": value
            for key, value in record.items()
            if key != "step" and isinstance(value, int | float)
        }
        logger.log(step, values, record.get("wall_time", time.time()))
        self._next_step = step + 1

    def _store(self, logger: Logger) -> None:
        self._state_path.parent.mkdir(exist_ok=True)
        write_atomic(self._state_path, encode({"run": logger.run_id, "steps": self._next_step}))

    def _fail(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._notices.append(f"{self.name} fails and is tried again later: {redact(reason)[:300]}")
        self._retry_at = time.monotonic() + self._retry_s
        failed, self._logger = self._logger, None
        if failed is not None:
            with suppress(Exception):
                failed.finish(None)


def num_sent(folder: Path, name: str) -> int:
    """How many steps of the run the logger has."""
    return _state(_state_path(folder, name))[1]


def _state(path: Path) -> tuple[str | None, int]:
    """The remote run's id, if there is one, and how many steps it has."""
    state = (decode(path.read_bytes()) if path.exists() else None) or {}
    run_id, num_steps = state.get("run"), state.get("steps")
    return (run_id, num_steps) if isinstance(run_id, str) and isinstance(num_steps, int) else (None, 0)


def _state_path(folder: Path, name: str) -> Path:
    return folder / "loggers" / f"{name}.json"
