"""The journal of every rank but the first: it records nothing and prints nothing."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

from qerl.config import RunConfig
from qerl.tracking.journal import StepLog, Stopwatch


class NullJournal:
    result: dict[str, Any] | None = None

    def __init__(self):
        self._stopwatch = Stopwatch(lambda phase: None)

    def start(self, config: RunConfig, sources: Mapping[str, str]) -> None: ...

    def check_sources(self, sources: Mapping[str, str], kinds: tuple[str, ...]) -> None: ...

    def resume(self, next_step: int) -> None: ...

    def notice(self, text: str) -> None: ...

    def finish(self, result: dict[str, Any]) -> None: ...

    def catch_up(self) -> None: ...

    @contextmanager
    def step(self, step: int) -> Iterator[StepLog]:
        yield StepLog(step, self._stopwatch, "answer")

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._stopwatch.span(name)

    def steps(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...
