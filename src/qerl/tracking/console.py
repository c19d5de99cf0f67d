"""Show a run on the console: a line per step or, on a terminal, a panel that is updated in place."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from qerl.tracking.metric_text import clock, headline_metrics, one_line, plain_line, seconds_left, sparkline
from qerl.tracking.progress import work_lines
from qerl.types import Report

_REFRESHES_PER_S = 2
_SPARK_WIDTH = 40
_FRAME = 2  # columns that the panel's border takes, without the spaces after the last metric


class PlainDisplay:
    """A line per step, for a file or a pipe."""

    def __init__(self, console: Console, num_steps: int, title: str):
        self._console, self._num_steps = console, num_steps
        self._step_seconds: list[float] = []
        self._started, self._has_total = time.monotonic(), False
        self.end_s = 0.0
        """Seconds that the evaluation after the last step is expected to take."""

    def restore(self, records: list[dict[str, Any]]) -> None:
        """Take over the steps that an earlier process finished."""
        self._step_seconds = [record["step_s"] for record in records]
        self._has_total = bool(records)

    def phase(self, name: str | None) -> None:
        """Show the phase that starts now; None between phases."""

    def finished(self, step: int, metrics: Mapping[str, float], sample: str | None) -> None:
        """Show a step's metrics; a panel also shows the text of one of its samples."""
        self._step_seconds.append(metrics["step_s"])
        steps_left = self._num_steps - step - 1
        left_s = seconds_left(self._step_seconds, steps_left, self.end_s)
        self._print(plain_line(metrics, steps_done=step + 1, num_steps=self._num_steps, left_s=left_s))
        if steps_left and left_s is not None and not self._has_total:
            total_s = time.monotonic() - self._started + left_s
            self._print(f"about {clock(total_s)} in all, by the speed of this step")
        self._has_total = True

    def notice(self, text: str) -> None:
        self._print(one_line(text))

    def work(self, name: str, *, begins: bool) -> contextlib.AbstractContextManager[Report]:
        """Show a long piece of work between steps, or in a phase, and how far it is. begins: also that it
        begins."""
        return work_lines(self._print, one_line(name), begins=begins)

    def close(self) -> None: ...

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


class PanelDisplay:
    """A panel on a terminal, redrawn twice a second to show the running phase's time."""

    def __init__(self, console: Console, num_steps: int, title: str):
        self._console, self._num_steps, self._title = console, num_steps, title
        self._steps_done = 0
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._step_seconds: list[float] = []
        self._sample: str | None = None
        self._phase: str | None = None
        self._counts = ""
        self._started = self._phase_started = time.monotonic()
        self.end_s = 0.0
        """As PlainDisplay.end_s."""
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=_REFRESHES_PER_S)

    def restore(self, records: list[dict[str, Any]]) -> None:
        self._live.start()
        self._steps_done = len(records)
        self._rewards = [record["reward"] for record in records if record.get("reward") is not None]
        self._step_seconds = [record["step_s"] for record in records]

    def phase(self, name: str | None) -> None:
        self._live.start()
        self._phase, self._phase_started = name, time.monotonic()

    def finished(self, step: int, metrics: Mapping[str, float], sample: str | None) -> None:
        self._live.start()
        self._steps_done, self._metrics = step + 1, metrics
        self._step_seconds.append(metrics["step_s"])
        self._rewards += [metrics["reward"]] if math.isfinite(metrics.get("reward", math.nan)) else []
        self._sample = self._sample if sample is None else sample
        self._live.refresh()

    def notice(self, text: str) -> None:
        self._console.print(one_line(text), markup=False, highlight=False, emoji=False)

    @contextlib.contextmanager
    def work(self, name: str, *, begins: bool) -> Iterator[Report]:
        before = self._phase, self._phase_started
        self.phase(one_line(name))

        def report(done: int, total: int, unit: str) -> None:
            self._counts = f" {done:,}/{total:,} {unit}"

        yield report
        self._counts, (self._phase, self._phase_started) = "", before

    def close(self) -> None:
        self._phase, self._counts = None, ""
        self._live.stop()

    def render(self) -> RenderableType:
        rows = Group(self._progress(), self._numbers(), self._reward_and_phase(), self._newest_sample())
        return Panel(rows, title=Text(self._title), title_align="left", border_style="dim")

    def _progress(self) -> RenderableType:
        left_s = seconds_left(self._step_seconds, self._num_steps - self._steps_done, self.end_s)
        times = f"elapsed {clock(time.monotonic() - self._started)}"
        columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
        row = Table.grid(*columns, expand=True, padding=(0, 2, 0, 0))
        row.add_row(
            Text(f"step {self._steps_done}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=self._steps_done),
            Text(times if left_s is None else f"{times}  left {clock(left_s)}"),
        )
        return row

    def _numbers(self) -> Text:
        line, room = Text(), self._console.width - _FRAME
        for label, number in headline_metrics(self._metrics):
            size = len(label) + len(number) + 3
            if room < size:  # a line ends between two metrics only
                line.append("\n")
                room = self._console.width - _FRAME
            room -= size
            line.append(f"{label} ", style="dim").append(number, style="bold").append("  ")
        return line if line.plain else Text("waiting for the first step", style="dim")

    def _reward_and_phase(self) -> Text:
        line, phase = Text(no_wrap=True), self._phase
        bars = sparkline(self._rewards, width=_SPARK_WIDTH, is_ascii=self._console.options.ascii_only)
        if bars:
            line.append("reward ", style="dim").append(f"{bars}  ", style="green")
        if phase is not None:
            line.append("now ", style="dim").append(phase, style="cyan")
            line.append(self._counts).append(f" {clock(time.monotonic() - self._phase_started)}", style="dim")
        return line

    def _newest_sample(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis")
        if self._sample is None:
            return line.append("waiting for the first sample", style="dim")
        return line.append("sample ", style="dim").append(one_line(self._sample), style="italic")
