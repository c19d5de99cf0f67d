"""The run's record, step by step: what a step measured, how long its phases took, what its samples said.

    run.json        the resolved config, command, commit, versions, device; written first
    metrics.jsonl   a line a step: step, metrics, `<phase>_s`, step_s, tokens_per_s, memory_gb, wall_time
    samples.jsonl   a line a sample: step, prompt, text, reward, advantage
    events.jsonl    notices              loggers/, tensorboard/    the metrics again: mirror.py
    result.json     written last         .lock           held while a process writes here

A step is on the disk when its block is left, or not at all: its samples first, then its line of metrics.
So a checkpoint belongs behind the block, under `journal.span("checkpoint")`: a run that was killed then has
every step that its checkpoint has. What a span takes between steps is counted with the step that follows.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console

from qerl.config import RunConfig
from qerl.errors import UserError, redact
from qerl.kernels.gpu_memory import peak_bytes
from qerl.tracking.async_logger import AsyncLogger, num_sent
from qerl.tracking.atomic_file import JsonLines, Lock, encode, finite, read_object, write_atomic
from qerl.tracking.console import Display, PanelDisplay, PlainDisplay
from qerl.tracking.loggers import LOGGERS, check_loggers
from qerl.tracking.provenance import changes, check_same_run, run_facts
from qerl.types import Group

_CLOSING_S = 30.0  # what the loggers have to send the last steps
MAX_ANSWER_CHARACTERS = 1000
"""Kept of an answer beside each sample: the tests of a programming problem may be megabytes."""


class Stopwatch:
    """Seconds by phase. Phases do not nest, so that they add up to no more than the whole."""

    def __init__(self, show: Callable[[str | None], None]):
        self._show = show
        self._running: str | None = None
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        assert self._running is None, f"span {name} inside span {self._running}"
        self._running, begin = name, time.perf_counter()
        self._show(name)
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin
            self._running = None
            self._show(None)

    def take(self) -> dict[str, float]:
        """`<name>_s` for each phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return {f"{name}_s": seconds for name, seconds in taken.items()}


class StepLog:
    """What one step reports while it runs."""

    def __init__(self, step: int, stopwatch: Stopwatch, answer_column: str):
        self.step, self._stopwatch, self._answer_column = step, stopwatch, answer_column
        self.metrics: dict[str, float] = {}
        self.sample_records: list[dict[str, Any]] = []

    def span(self, name: str) -> AbstractContextManager[None]:
        """Times a phase; the same name again in one step adds up."""
        return self._stopwatch.span(name)

    def add(self, **metrics: float) -> None:
        """A later value of the same key takes its place."""
        self.metrics |= {key: float(value) for key, value in metrics.items()}

    def samples(self, groups: list[Group]) -> None:
        """Keeps every sample of the groups; give only those that are to be kept."""
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
            }
            for group in groups
            for sample_index, sample in enumerate(group.samples_G)
        ]

    def _answer(self, columns: dict[str, Any]) -> str | None:
        value = columns.get(self._answer_column, columns.get("answer"))
        return None if value is None else str(value)[:MAX_ANSWER_CHARACTERS]


class Journal:
    """Owns a run's folder from construction to close(); a second Journal there is refused.

    with Journal(folder, num_steps=30) as journal:
        journal.start(config)
        journal.resume(next_step)
        with journal.step(next_step) as log: ...
        journal.finish({"accuracy": 0.9})
    """

    def __init__(self, folder: Path, *, num_steps: int, console: Console | None = None):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder)
            self._metrics, self._samples, self._events = (
                JsonLines(folder / f"{name}.jsonl") for name in ("metrics", "samples", "events")
            )
        except OSError as error:
            raise UserError(f"{folder}: cannot hold a run ({error.strerror})") from None
        self._folder, self._num_steps = folder, num_steps
        self._next_step = 1 + max((record["step"] for record in self.steps()), default=-1)
        self._open_step: int | None = None
        self._answer_column = "answer"
        self._loggers, self._shown_config = RunConfig().loggers, {}
        self._mirrors: list[AsyncLogger] = []
        self._result: dict[str, Any] | None = None
        console = console or Console()
        is_panel = console.is_terminal and not console.is_dumb_terminal
        kind = PanelDisplay if is_panel else PlainDisplay
        self._display: Display = kind(console, num_steps, str(folder))
        self._stopwatch = Stopwatch(self._display.phase)

    @property
    def result(self) -> dict[str, Any] | None:
        """What finish() wrote here; None for a run that has not ended."""
        path = self._folder / "result.json"
        return read_object(path) if path.exists() else None

    def start(self, config: RunConfig) -> None:
        """Writes run.json; once a step is recorded, the config must agree but for `provenance.EXEMPT`."""
        check_loggers(config.loggers)
        self._answer_column, self._loggers = config.task.answer_column, config.loggers
        path, facts = self._folder / "run.json", finite(run_facts(config))
        self._shown_config = facts["config"]
        if not self._next_step:
            write_atomic(path, encode(facts, indent=2))
            return
        if not path.exists():
            raise UserError(
                f"{self._folder}: has metrics.jsonl but no run.json; choose another folder with --out"
            )
        old = read_object(path)
        check_same_run(path, old.get("config", {}), facts["config"])
        for name, (was, now) in changes(old, facts).items():
            if name not in ("command", "start_time", "config.out"):
                self.notice(f"{name} is {now}, the run began with {was}")

    def resume(self, next_step: int) -> None:
        """Forgets steps from next_step on: going on from there leaves the files of an unbroken run."""
        kept = {"metrics": self._metrics.cut(next_step), "samples": self._samples.cut(next_step)}
        records = list(self.steps())
        # dynamic sampling may have found no group to keep
        kept["samples"] |= {record["step"] for record in records if record.get("trained_samples") == 0}
        self._display.restore(records)
        self._next_step = next_step
        for name, steps in kept.items():
            if len(steps) < next_step:
                self.notice(f"{name}.jsonl lacks {next_step - len(steps)} of the {next_step} steps taken")
        if next_step:
            self.notice(f"goes on after step {next_step}/{self._num_steps}")

    @contextmanager
    def step(self, step: int) -> Iterator[StepLog]:
        """Records the block as one step; if it raises, nothing of it."""
        assert self._open_step is None, f"step {step} inside step {self._open_step}"
        assert step >= self._next_step, f"step {step} is recorded already: resume({step}) forgets it"
        log, begin = StepLog(step, self._stopwatch, self._answer_column), time.perf_counter()
        self._open_step = step
        try:
            yield log
        except BaseException:
            self._stopwatch.take()
            raise
        finally:
            self._open_step = None
        self._record(log, time.perf_counter() - begin)
        self._next_step = step + 1

    def span(self, name: str) -> AbstractContextManager[None]:
        """Times a phase between steps, such as a checkpoint; counted with the step that follows."""
        return self._stopwatch.span(name)

    def steps(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        return (record for record in self._metrics.read() if record is not None and "step" in record)

    def notice(self, text: str) -> None:
        """For the user, now; and for whoever reads events.jsonl later."""
        text = redact(text)
        self._events.append([{"wall_time": time.time(), "step": self._open_step, "text": text}])
        self._display.notice(text)

    def finish(self, result: dict[str, Any]) -> None:
        write_atomic(self._folder / "result.json", encode(result, indent=2))
        self._result = result

    def catch_up(self) -> None:
        """For a run that has ended: gives the loggers that lack steps of it the rest."""
        self._result = self.result
        self._loggers = tuple(n for n in self._loggers if num_sent(self._folder, n) < self._next_step)
        self._mirror(self._next_step)

    def close(self) -> None:
        with ExitStack() as stack:  # each is closed even if another fails, the lock last
            for part in (self._lock, self._metrics, self._samples, self._events, self._display):
                stack.callback(part.close)
            stack.callback(self._close_mirrors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _record(self, log: StepLog, step_s: float) -> None:
        metrics = {"memory_gb": memory_gb(), **log.metrics, **self._stopwatch.take()}
        metrics |= {"step_s": step_s, "wall_time": time.time()}
        if "sampled_tokens" in metrics and metrics.get("rollout_s"):
            metrics.setdefault("tokens_per_s", metrics["sampled_tokens"] / metrics["rollout_s"])
        if log.sample_records:
            self._samples.append(log.sample_records)
        self._metrics.append([{"step": log.step, **metrics}])
        self._mirror(log.step)
        newest = log.sample_records[-1]["text"] if log.sample_records else None
        self._display.finished(log.step, metrics, newest)

    def _mirror(self, step: int) -> None:
        if not self._mirrors:
            self._mirrors = [
                AsyncLogger(name, LOGGERS[name], self._folder, self._shown_config, first_step=step)
                for name in self._loggers
            ]
        for mirror in self._mirrors:
            mirror.follow()
        self._tell_of_mirrors()

    def _close_mirrors(self) -> None:
        for mirror in self._mirrors:
            mirror.end(self._result)
        deadline = time.monotonic() + _CLOSING_S
        for mirror in self._mirrors:
            mirror.join(max(0.0, deadline - time.monotonic()))
        self._tell_of_mirrors()

    def _tell_of_mirrors(self) -> None:
        for mirror in self._mirrors:
            for text in mirror.notices():
                self.notice(text)


def memory_gb() -> float:
    """The most this process has held so far: of the GPU's memory if it uses one, else of main memory."""
    if torch.cuda.is_initialized():
        return peak_bytes(torch.device("cuda")) / 1e9
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
