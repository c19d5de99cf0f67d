"""Record each step of a run in its folder: metrics, phase durations and samples.

    run.json        the resolved config, command, commit, versions, device, hashes of sources; written first
    metrics.jsonl   a line per step: step, metrics, `<phase>_s`, step_s, tokens_per_s, memory_gb, wall_time
    samples.jsonl   a line per sample: step, prompt, text, reward, advantage; older ones in samples/
    held_out.jsonl  a line per answer to a held-out problem, by the number of steps before it
    events.jsonl    notices              loggers/, tensorboard/    the metrics again: async_logger.py
    result.json     written last         .lock           locked while a process writes here

A step is written when its `with` block ends, or not at all: its samples first, then its line of metrics. A
checkpoint therefore comes after the block, under `journal.span("checkpoint_hold")`: the files of a killed run
then have every step that its checkpoint has. The time of a span between steps is added to the step that
follows, and so is that of writing a step, `record_s`.
"""

import functools
import itertools
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from rich.console import Console

from qerl.config import RunConfig
from qerl.config.stored import with_defaults
from qerl.errors import RunError, StoppedAtOnce, UserError, redact, require
from qerl.kernels.runtime.gpu_memory import peak_bytes
from qerl.tracking.async_logger import AsyncLogger, num_sent
from qerl.tracking.atomic_file import (
    Lock,
    OpenFolder,
    encode,
    finite,
    make_folder,
    read_object,
    sync_path,
    write_atomic,
)
from qerl.tracking.console import PanelDisplay, PlainDisplay
from qerl.tracking.json_lines import JsonLines, damage_notice
from qerl.tracking.loggers import LOGGERS, check_loggers
from qerl.tracking.progress import silent
from qerl.tracking.provenance import ROUNDING, changes, check_same_run, check_sources, run_facts, shown
from qerl.tracking.sample_files import SampleFiles
from qerl.tracking.step_log import StepLog, Stopwatch
from qerl.types import Group, Report

_NUM_STEPS = "config.num_steps"
# A start that fails before its first step takes them away; the lock last, so that no other run comes between.
_OF_A_START = (
    "run.json",
    "metrics.jsonl",
    "samples.jsonl",
    "events.jsonl",
    "evaluations.json",
    "held_out.jsonl",
    "calibrate.json",
    ".lock",
)
_MAX_HELD_OUT = 64  # problems of an evaluation whose answers are recorded
_LOGGER_TIMEOUT_S = 30.0  # for sending the last steps when the run ends


class Journal:
    """Owns a run's folder from construction to close(); a second Journal there raises UserError.

    with Journal(folder, num_steps=30) as journal:
        journal.start(config)
        journal.resume(next_step)
        with journal.step(next_step) as log: ...
        journal.finish({"accuracy": 0.9})
    """

    def __init__(self, folder: Path, *, num_steps: int, console: Console | None = None):
        self._owns_files = _has_no_files(folder)
        try:
            self._made = make_folder(folder)
            self._lock = Lock(folder)
            with ExitStack() as unless_opened:
                unless_opened.callback(self._lock.close)  # os.register_at_fork refers to its file
                sync_path(folder)  # until run.json is there, the lock tells the next files from a stranger's
                self._metrics = JsonLines(folder / "metrics.jsonl")
                self._events = JsonLines(folder / "events.jsonl")
                self._samples = SampleFiles(folder)
                sync_path(folder)
                self._open_folder = OpenFolder(folder)
                self.place = self._open_folder.place
                unless_opened.pop_all()
        except OSError as error:
            raise UserError(f"cannot write a run to {folder}: {error.strerror}; set another --out") from None
        self._folder, self._num_steps = folder, num_steps
        self._next_step = 1 + max((record["step"] for record in self.steps()), default=-1)
        self._open_step: int | None = None
        self._answer_column = "answer"
        self._logger_names, self._config = RunConfig().loggers, {}
        self._facts: dict[str, Any] = {}
        self._changed: dict[str, tuple[Any, Any]] = {}
        self._compares_sources = self.is_same_run = False
        """is_same_run: True once started where a run of this config, rewards and files began already."""
        self._loggers: list[AsyncLogger] = []
        self._result: dict[str, Any] | None = None
        console = console or Console()
        is_panel = console.is_terminal and not console.is_dumb_terminal
        kind = PanelDisplay if is_panel else PlainDisplay
        self._display = kind(console, num_steps, str(folder))
        self._stopwatch = Stopwatch(self._display.phase)
        self.span = self._stopwatch.span
        """Times a phase between steps, such as a checkpoint; it is added to the step that follows."""
        self._carried: dict[str, float] = {}
        # The threads that write checkpoints and report signals append too.
        self._events_lock = threading.Lock()

    @property
    def result(self) -> dict[str, Any] | None:
        """Content of result.json; None if the run is not complete, or is now given more steps."""
        path = self._folder / "result.json"
        return read_object(path) if path.exists() and _NUM_STEPS not in self._changed else None

    def start(self, config: RunConfig, sources: Mapping[str, str] = MappingProxyType({})) -> None:
        """Write run.json, with the hashes of rewards and files. Once a step is recorded, check that nothing
        but fields in `provenance.EXEMPT`, more steps and what the user accepts differs from it."""
        check_loggers(config.loggers)
        self._samples.config = config.samples
        self._answer_column, self._logger_names = config.task.answer_column, config.loggers
        path, facts = self._folder / "run.json", finite(run_facts(config))
        self._config, self._facts = facts["config"], facts
        if not self._next_step and path.exists():
            old = _read_facts(path)
            same_sources = dict(sources).items() <= old.get("sources", {}).items()
            self.is_same_run = same_sources and not changes(old["config"], facts["config"])
        if self._next_step:
            if not path.exists():
                lacks = "has metrics.jsonl but no run.json"
                raise UserError(f"{self._folder}: {lacks}; choose another folder with --out")
            self._facts = old = _read_facts(path)
            self._changed = check_same_run(path, old["config"], facts["config"])
            for name, (was, now) in changes({key: old.get(key) for key in facts}, facts).items():
                if name not in ("command", "start_time", "config.out", *self._changed):
                    self.notice(f"{name} is now {now}; the run started with {was}")
            self.is_same_run = not self._changed
        self._compares_sources = self._next_step > 0
        self.check_sources(sources, ("reward ", "rows of "))

    def check_sources(self, sources: Mapping[str, str], kinds: tuple[str, ...]) -> None:
        """Record these hashes in run.json; once a step is recorded, compare them with those of their kinds,
        which begin their names."""
        path, recorded = self._folder / "run.json", self._facts.setdefault("sources", {})
        if self._compares_sources:
            old = {name: value for name, value in recorded.items() if name.startswith(kinds)}
            accepts = self._config["accept_changes"]
            self._changed |= check_sources(path, old, dict(sources), accept_changes=accepts)
            return
        recorded.update(sources)
        write_atomic(path, encode(self._facts, indent=2))

    def resume(self, next_step: int) -> None:
        """Remove steps from next_step on, so that the files become those of an uninterrupted run."""
        was_further = self.last_saved > next_step
        if (path := self._folder / "held_out.jsonl").exists():
            with closing(
                JsonLines(path)
            ) as file:  # answers before the first step hold for the same run alone
                file.cut(next_step + 1 if next_step or self.is_same_run else 0)
        remaining = {"metrics": self._metrics.cut(next_step), "samples": self._samples.cut(next_step)}
        records = list(self.steps())
        # dynamic sampling may have kept no group
        remaining["samples"].steps.update(r["step"] for r in records if r.get("trained_samples") == 0)
        self._display.restore(records)
        self._next_step = next_step
        self._record_changes(next_step)
        for name, (steps, damaged, torn) in remaining.items():
            if damaged := damaged + torn * (len(steps) < next_step):
                self.notice(damage_notice(f"{name}.jsonl", damaged))
            if len(steps) < next_step:
                missing = next_step - len(steps)
                self.notice(f"{name}.jsonl is missing {missing} of {next_step} completed steps")
        if was_further:
            self._note(f"{next_step} steps are left", checkpoint=next_step)
        if next_step:
            self.notice(f"resuming after step {next_step}/{self._num_steps}")

    def _record_changes(self, next_step: int) -> None:
        """Write what the run goes on with from this step on to run.json, and say it."""
        if not self._changed:
            return
        for name, (was, now) in self._changed.items():
            *path, last = name.split(".") if name.startswith("config.") else name.split(".", 1)
            functools.reduce(dict.__getitem__, path, self._facts)[last] = now
            label, first = name.partition(".")[2], next_step + 1
            text = f"{label} was {shown(was)} and is {shown(now)} from step {first} on"
            more = ": learning rate and sigma are then those of a run of that many steps"
            if name.removeprefix("config.") in ROUNDING:
                more = ": logprobs and gradients may be rounded otherwise"
            elif name != _NUM_STEPS:
                more = "; figures of earlier steps are of the former one"
            self.notice(text + more)
        self._facts.setdefault("history", []).append({"step": next_step, "changed": self._changed})
        if _NUM_STEPS in self._changed:  # before run.json: it must not look complete
            (self._folder / "result.json").unlink(missing_ok=True)
        write_atomic(self._folder / "run.json", encode(self._facts, indent=2))
        self._changed = {}

    @contextmanager
    def step(self, step: int) -> Iterator[StepLog]:
        """Record the block as one step, or nothing if it raises."""
        assert self._open_step is None, f"step {step} inside step {self._open_step}"
        assert step >= self._next_step, f"step {step} is recorded already; call resume({step}) first"
        log, begin = StepLog(step, self._stopwatch, self._answer_column), time.perf_counter()
        self._open_step = step
        try:
            yield log
        except BaseException:
            self._stopwatch.take()
            raise
        finally:
            self._open_step = None
        end = time.perf_counter()
        self._record(log, end - begin)
        self.carry(record_s=time.perf_counter() - end)
        self._next_step = step + 1

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl."""
        return (record for record in self._metrics.read() if "step" in record)

    @property
    def last_line(self) -> dict[str, Any]:
        """The last step's line of metrics.jsonl; {} without it, or if what the run goes on with has changed
        since, such as its rows."""
        line = max(self.steps(), key=itemgetter("step"), default={"step": None})
        has_changed = any(change["step"] >= self._next_step for change in self._facts.get("history", ()))
        return {} if has_changed or line["step"] != self._next_step - 1 else line

    def notice(self, text: str) -> None:
        """Show a message and append it to events.jsonl."""
        text = redact(text)
        self._note(text)
        self._display.notice(text)

    def held_out(
        self, num_steps: int, answers: Mapping[str, tuple[list[Group], list[list[float | None]]]]
    ) -> None:
        """Append answers to the first held-out problems, and their rewards, after this many steps.

        answers: by the kind of sampling."""
        records = []
        for kind, (groups, rewards_P_G) in answers.items():
            log = StepLog(num_steps, self._stopwatch, self._answer_column)
            log.samples(groups[:_MAX_HELD_OUT])
            rewards = itertools.chain(*rewards_P_G[:_MAX_HELD_OUT])
            pairs = zip(log.sample_records, rewards, strict=True)
            records += [record | {"reward": reward, "kind": kind} for record, reward in pairs]
        if (folder := self.place()) is not None:
            with closing(JsonLines(folder / "held_out.jsonl")) as file:
                file.append(records)

    def work(self, name: str, *, begins: bool = True) -> AbstractContextManager[Report]:
        """Show a long piece of work and how far it is; nothing of it is recorded. begins: also say that it
        begins."""
        return self._display.work(redact(name), begins=begins)

    def expect(self, *, end_s: float) -> None:
        """Count these seconds, of what follows the last step, as time left."""
        self._display.end_s = end_s

    def saved(self, next_step: int) -> None:
        """Record that a checkpoint of the state before this step is on the disk; in any thread."""
        self._note(f"saved a checkpoint after step {next_step}", checkpoint=next_step)

    def carry(self, **seconds: float) -> None:
        """Set metrics of the step that follows, of what ran beside the steps."""
        self._carried |= seconds

    @property
    def last_saved(self) -> int:
        """Number of steps of the newest checkpoint that is recorded; 0 without one.

        events.jsonl has each. In metrics.jsonl the step that follows its copy has checkpoint_hold_s, and a
        later one checkpoint_write_s.
        """
        events = [event.get("checkpoint") for event in self._events.read()]
        noted = [next_step for next_step in events if isinstance(next_step, int)]
        copied, timed = 0, [0]
        for record in self.steps():
            if record.get("checkpoint_write_s"):
                timed.append(copied)
            copied = record["step"] if record.get("checkpoint_hold_s") else copied
        return max([*noted[-1:], *timed])

    def _note(self, text: str, **more: int) -> None:
        event = {"wall_time": time.time(), "step": self._open_step, "text": text, **more}
        with self._events_lock:
            self._events.append([event])

    def finish(self, result: dict[str, Any]) -> None:
        write_atomic(self._folder / "result.json", encode(result, indent=2))
        self._result = result

    def catch_up(self) -> None:
        """Send the steps of a complete run that a logger does not have yet."""
        self._result = self.result
        names = (name for name in self._logger_names if num_sent(self._folder, name) < self._next_step)
        self._logger_names = tuple(names)
        self._wake_loggers(self._next_step)

    def close(self) -> None:
        with ExitStack() as stack:  # all are closed even if one fails, the lock last
            parts = self._open_folder, self._metrics, self._samples, self._events, self._display
            for part in (self._lock, *parts):
                stack.callback(part.close)
            stack.callback(self._close_loggers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, UserError) and not self._next_step and self._owns_files:
            with suppress(OSError):  # a folder that holds anything else stays
                for name in _OF_A_START:
                    (self._folder / name).unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()
        try:
            if kind is StoppedAtOnce:
                with suppress(
                    OSError, RunError, UserError
                ):  # a damaged file, a full disk or a closed console
                    saved = self.last_saved
                    self.notice(f"stopped at once; {resumes_from(saved) if saved else 'no step is saved'}")
        finally:
            self.close()

    def _record(self, log: StepLog, step_s: float) -> None:
        metrics = {"memory_gb": memory_gb(), **log.metrics, **self._stopwatch.take(), **self._carried}
        self._carried = {}
        metrics |= {"step_s": step_s, "wall_time": time.time()}
        if "sampled_tokens" in metrics and metrics.get("rollout_s"):
            metrics.setdefault("tokens_per_s", metrics["sampled_tokens"] / metrics["rollout_s"])
        if self.place() == self._folder:
            self._repair()
        if log.sample_records:
            self._samples.append(log.sample_records)
        self._metrics.append([{"step": log.step, **metrics}])
        self._wake_loggers(log.step)
        newest = log.sample_records[-1]["text"] if log.sample_records else None
        self._display.finished(log.step, metrics, newest)

    def _repair(self) -> None:
        """Repair, and report, what another program did to the files since the last step."""
        with self._events_lock:
            texts = [self._events.repair()]
        for text in [*texts, *(file.repair() for file in (self._samples, self._metrics))]:
            if text is not None:
                self.notice(text)

    def _wake_loggers(self, step: int) -> None:
        if not self._loggers:
            self._loggers = [
                AsyncLogger(name, LOGGERS[name], self._folder, self._config, first_step=step)
                for name in self._logger_names
            ]
        for logger in self._loggers:
            logger.wake()
        self._show_logger_notices()

    def _close_loggers(self) -> None:
        for logger in self._loggers:
            logger.end(self._result)
        deadline = time.monotonic() + _LOGGER_TIMEOUT_S
        for logger in self._loggers:
            logger.join(max(0.0, deadline - time.monotonic()))
        self._show_logger_notices()

    def _show_logger_notices(self) -> None:
        for logger in self._loggers:
            for text in logger.notices():
                self.notice(text)


class NullJournal:
    """The journal of every rank but the first: it records nothing and prints nothing."""

    result: dict[str, Any] | None = None
    last_line: Mapping[str, Any] = MappingProxyType({})
    last_saved, is_same_run = 0, False

    def __init__(self):
        self._stopwatch = Stopwatch(lambda phase: None)
        self.span = self._stopwatch.span

    def _ignore(self, *_: object, **__: object) -> None: ...

    def work(self, name: str, *, begins: bool = True) -> AbstractContextManager[Report]:
        return silent(name)

    start = check_sources = resume = notice = held_out = place = expect = saved = carry = _ignore
    finish = catch_up = __exit__ = _ignore

    @contextmanager
    def step(self, step: int) -> Iterator[StepLog]:
        yield StepLog(step, self._stopwatch, "answer")

    def steps(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def __enter__(self) -> Self:
        return self


def _has_no_files(folder: Path) -> bool:
    """Return True if no file in it has the name of a run's; raise UserError if it has some and is no run."""
    # A run that was removed while it ran has checkpoints alone.
    is_run = any((folder / name).exists() for name in ("run.json", ".lock"))
    is_run |= any((folder / "checkpoints").glob("step-*"))
    own_names = [name for name in (*_OF_A_START, "result.json", "report.html") if (folder / name).exists()]
    lacks = f"has {' and '.join(own_names)}, which a run would write, but no run.json"
    require(is_run or not own_names, f"{folder}: {lacks}; choose another folder with --out")
    return not own_names


def _read_facts(path: Path) -> dict[str, Any]:
    """Return run.json with the fields of the config that were added after it was written."""
    facts = read_object(path)
    return facts | {"config": with_defaults(facts.get("config", {}))}


def resumes_from(num_steps: int) -> str:
    return f"step {num_steps} is saved; the same command resumes from it"


def memory_gb() -> float:
    """Return this process's peak memory: of the GPU if it uses one, else of main memory."""
    if torch.cuda.is_initialized():
        return peak_bytes(torch.device("cuda")) / 1e9
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
