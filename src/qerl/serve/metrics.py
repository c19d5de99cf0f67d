"""Count what the server does, and write it in Prometheus' text format (version 0.0.4).

    counter     a number that only rises         name_total
    gauge       a number that is read when asked for
    histogram   how many values lie at or below each bound, with their sum

The event loop alone counts. What the batcher's thread counts are gauges and counters that are read from it.
docs/serving.md lists all names.
"""

import bisect
import collections
import itertools
from collections.abc import Callable, Iterable, Iterator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class LabeledCounter:
    """Counts by the values of its labels."""

    def __init__(self, name: str, help_text: str, *labels: str):
        self._name, self._help, self._labels = name, help_text, labels
        self._counts = collections.Counter[tuple[str, ...]]()

    def add(self, *values: str) -> None:
        assert len(values) == len(self._labels)
        self._counts[values] += 1

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, self._help, "counter")
        counts = self._counts or ({} if self._labels else {(): 0})
        for values, count in sorted(counts.items()):
            yield f"{self._name}{_labels(zip(self._labels, values, strict=True))} {count}"


class TimeHistogram:
    """Durations in seconds."""

    def __init__(self, name: str, help_text: str, bounds_s: tuple[float, ...]):
        self._name, self._help, self._bounds_s = name, help_text, bounds_s
        self._counts, self._sum_s = [0] * (len(bounds_s) + 1), 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect.bisect_left(self._bounds_s, duration_s)] += 1
        self._sum_s += duration_s

    def lines(self) -> Iterator[str]:
        yield from _head(self._name, self._help, "histogram")
        bounds = [*map(str, self._bounds_s), "+Inf"]
        for bound, count in zip(bounds, itertools.accumulate(self._counts), strict=True):
            yield f"{self._name}_bucket{_labels([('le', bound)])} {count}"
        yield f"{self._name}_sum {self._sum_s}"
        yield f"{self._name}_count {sum(self._counts)}"


class ServerMetrics:
    def __init__(self):
        self.responses = LabeledCounter(
            "qerl_http_responses_total", "Responses by path and status.", "path", "status"
        )
        self.closed = LabeledCounter(
            "qerl_http_connections_closed_total", "Connections that the server ended, by reason.", "reason"
        )
        self.accept_errors = LabeledCounter(
            "qerl_http_accept_errors_total", "Connections that could not be accepted."
        )
        self.first_token = TimeHistogram(
            "qerl_time_to_first_token_seconds",
            "From a request's entry into the queue to its first token.",
            _FIRST_TOKEN_BOUNDS_S,
        )
        self.duration = TimeHistogram(
            "qerl_request_duration_seconds",
            "From a request's entry into the queue to the end of its answer.",
            _DURATION_BOUNDS_S,
        )
        self.num_malformed_calls = 0
        self._read = list[tuple[str, str, Callable[[], float]]]()

    def add_read(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Show a number that another part keeps; a name that ends with _total is a counter."""
        self._read.append((name, help_text, read))

    def render(self) -> str:
        counters = (self.responses, self.closed, self.accept_errors, self.first_token, self.duration)
        lines = [line for counter in counters for line in counter.lines()]
        for name, help_text, read in self._read:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [*_head(name, help_text, kind), f"{name} {read()}"]
        return "".join(f"{line}\n" for line in lines)


def _head(name: str, help_text: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    """Return {name="value",...}; the values are the server's own words and need no escapes."""
    written = ",".join(f'{name}="{value}"' for name, value in pairs)
    return f"{{{written}}}" if written else ""
