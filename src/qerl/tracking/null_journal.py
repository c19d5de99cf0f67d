"""The journal of every rank but the first: it records nothing and prints nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from qerl.tracking.journal import StepLog, Stopwatch


class NullJournal:
    result: dict[str, Any] | None = None

    def __init__(self):
        self._stopwatch = Stopwatch(lambda phase: None)

    def _ignore(self, *_: object) -> None: ...

    start = check_sources = resume = notice = finish = catch_up = __exit__ = _ignore

    @contextmanager
    def step(self, step: int) -> Iterator[StepLog]:
        yield StepLog(step, self._stopwatch, "answer")

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._stopwatch.span(name)

    def steps(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def __enter__(self) -> Self:
        return self
