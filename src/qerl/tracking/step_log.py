"""Collect a step's metrics, the seconds of its phases, and its samples."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qerl.types import Group

MAX_ANSWER_CHARACTERS = 1000
"""Answers are cut to this length: the tests of a programming problem may be megabytes."""


class Stopwatch:
    """Measures the seconds of each phase. Phases do not nest, so their sum is at most the step's time."""

    def __init__(self, on_phase: Callable[[str | None], None]):
        self._on_phase = on_phase
        self._running: str | None = None
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a phase; spans of the same name in one step are added."""
        assert self._running is None, f"span {name} inside span {self._running}"
        self._running, begin = name, time.perf_counter()
        self._on_phase(name)
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin
            self._running = None
            self._on_phase(None)

    def take(self) -> dict[str, float]:
        """Return `<name>_s` for each phase since the last call, and reset."""
        seconds_by_name, self._seconds = self._seconds, {}
        return {f"{name}_s": seconds for name, seconds in seconds_by_name.items()}


class StepLog:
    """Collects the metrics and samples of one step."""

    def __init__(self, step: int, stopwatch: Stopwatch, answer_column: str):
        self.step, self.span, self._answer_column = step, stopwatch.span, answer_column
        self.metrics: dict[str, float] = {}
        self.sample_records: list[dict[str, Any]] = []

    def add(self, **metrics: float) -> None:
        """Set metrics; a later value of the same key replaces the earlier one."""
        self.metrics |= {key: float(value) for key, value in metrics.items()}

    def samples(self, groups: list[Group]) -> None:
        """Record every sample of the groups."""
        self.sample_records += [
            {
                "step": self.step,
                "prompt_index": group.prompt.index,
                "sample_index": sample_index,
                "prompt": group.prompt.text,
                "text": sample.text,
                "reward": sample.reward,
                "advantage": sample.advantage,
                "finish": sample.finish,
                "num_tokens": len(sample.tokens_T),
                **({"prefix_tokens": group.prefix_tokens} if group.prefix_tokens else {}),
                "version": sample.version,
                "answer": self._answer(group.prompt.columns),
                **({} if sample.messages is None else {"turns": sample.messages}),
                **({} if sample.failure is None else {"failure": ": ".join(sample.failure)}),
            }
            for group in groups
            for sample_index, sample in enumerate(group.samples_G)
        ]

    def _answer(self, columns: dict[str, Any]) -> str | None:
        value = columns.get(self._answer_column, columns.get("answer"))
        return None if value is None else str(value)[:MAX_ANSWER_CHARACTERS]
