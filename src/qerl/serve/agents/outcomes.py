"""Report episodes from the agents' process: a line each when one begins and when it ends.

Lines go through a pipe and are shorter than PIPE_BUF, so that none is torn: if the process dies, the episodes
that were over keep their rewards.
"""

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from qerl.tasks.scoring import Failure
from qerl.tasks.worker_process import OWN_ENDS

MAX_METRICS = 32
_MAX_LINE_BYTES = 4096
_DRAIN_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of an episode."""

    reward: float | None = None
    failure: Failure | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class OutcomePipe:
    """Made before the agents' process is forked, which writes; a thread of this process reads."""

    def __init__(self):
        read_end, self._write_end = os.pipe()
        self._read_end = Connection(read_end, writable=False)
        OWN_ENDS.add(self._read_end)
        self._changed = threading.Condition()
        self._call, self._num, self._on_end = 0, 0, lambda index: None
        self.began_s: dict[int, float] = {}
        """The time at which each episode of this call began, by the monotonic clock."""
        self.ended_s: dict[int, float] = {}
        self.outcomes: dict[int, Outcome] = {}
        self._thread = threading.Thread(target=self._read, name="outcomes", daemon=True)

    def start(self) -> None:
        """Read from now on; the process that writes must have been forked."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; the process that writes must have ended."""
        os.close(self._write_end)
        self._thread.join(_DRAIN_S)

    def listen(self, call: int, num: int, on_end: Callable[[int], None]) -> None:
        """Forget all episodes, and take only the `num` of this call from now on. on_end gets the index of
        each that ends."""
        with self._changed:
            self._call, self._num, self._on_end = call, num, on_end
            self.began_s, self.ended_s, self.outcomes = {}, {}, {}

    def drain(self, num: int) -> None:
        """Wait until the outcomes of `num` episodes, which have ended, are read."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.outcomes) >= num, _DRAIN_S)

    def say_begun(self, call: int, index: int) -> None:
        self._write([call, index])

    def say_ended(self, call: int, index: int, outcome: Outcome) -> None:
        failure = outcome.failure and [outcome.failure.cause[:100], outcome.failure.message[:500]]
        self._write([call, index, outcome.reward, failure, outcome.metrics])

    def _write(self, values: list[Any]) -> None:
        line = _line(values)
        os.write(self._write_end, line if len(line) <= _MAX_LINE_BYTES else _line([*values[:4], {}]))

    def _read(self) -> None:
        with self._read_end, open(self._read_end.fileno(), "rb", closefd=False) as lines:
            for line in lines:
                if (event := _event(line)) is None:
                    continue
                with self._changed:
                    call, index, outcome = event
                    if call == self._call and index in range(self._num):
                        self._take(index, outcome)
                        self._changed.notify_all()

    def _take(self, index: int, outcome: Outcome | None) -> None:
        if outcome is None:
            self.began_s[index] = time.monotonic()
            return
        self.ended_s[index] = time.monotonic()
        self.outcomes[index] = outcome
        self._on_end(index)


def _event(line: bytes) -> tuple[int, int, Outcome | None] | None:
    """Return (call, index, its outcome if it has ended) of a line; None of one that is no event: the rest of
    one whose writer was killed, or what an agent wrote there, which may be anything."""
    try:
        call, index, *rest = json.loads(line)
        if not rest:
            return int(call), int(index), None
        reward, failure, metrics = rest
        outcome = Outcome(
            reward=None if reward is None else float(reward),
            failure=failure and Failure(*map(str, failure)),
            metrics={str(name): float(value) for name, value in metrics.items()},
        )
        return int(call), int(index), outcome
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _line(values: list[Any]) -> bytes:
    """Return the line in UTF-8: escapes of 600 emojis would take 7,200 bytes."""
    return json.dumps(values, ensure_ascii=False).encode(errors="replace") + b"\n"
