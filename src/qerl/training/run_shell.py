"""The shell of every run: open its folder, resume where it stopped, evaluate before and after, finish.

The run's folder:

    run.json           the resolved config, versions, commit
    metrics.jsonl      one line per step                samples.jsonl   one line per sample
    evaluations.json   held-out figures by moment       checkpoints/    adapter, optimizer, counters
    tensorboard/       the same metrics                 result.json, report.html   once the run is complete
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from qerl.config import EvalConfig, RunConfig
from qerl.engine.local_engine import LocalEngine
from qerl.learner import Learner
from qerl.learner.distributed import RankLost, Ranks
from qerl.models.peft.adapter import load_adapter
from qerl.models.peft.peft_reader import read_adapter
from qerl.models.policy_model import PolicyModel
from qerl.tracking import Journal, NullJournal
from qerl.tracking.atomic_file import encode, read_object, write_atomic
from qerl.tracking.report import write_report
from qerl.training.observer import NullObserver, Observer
from qerl.training.run_checkpoints import RunCheckpoints, check_vanished
from qerl.training.signals import ECHO_S, StopSignal
from qerl.types import RolloutEngine

EndStep = Callable[[int, dict[str, float]], bool]
"""(step, its metrics): save if due; True if the run is to stop here."""


class Training(Protocol):
    """Part of a run that differs between reinforcement learning (session.py) and fine-tuning (sft.py)."""

    config: RunConfig
    decoder: PolicyModel
    engine: LocalEngine
    sampler: RolloutEngine
    """The engine, or what wraps it for agents, environments, ranks or Ray."""
    learner: Learner
    evaluations_before: tuple[str, ...]
    """Names of the evaluations before the first step; none if nothing is held out."""

    def quantization_lines(self) -> Iterable[str | None]:
        """Yield what quantizing the weights at load changed; None: nothing."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores besides the learner, as JSON values."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue with this state."""

    def run_steps(self, first_step: int, end_step: EndStep) -> None:
        """Run the steps from this one on, up to the last one or until end_step is True."""
        ...

    def evaluate(self, moment: str) -> dict[str, float]:
        """Return the held-out figures. moment: of evaluations_before, or "after"."""
        ...

    def recorded_figures(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures of `evaluate` that a step's line in metrics.jsonl has; {} without an
        evaluation."""
        return {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}

    def evaluation_text(self, moment: str, figures: dict[str, float]) -> str:
        """Return the console's line of what `evaluate` has returned."""
        ...

    def result(self, evaluations: dict[str, Any]) -> dict[str, float]:
        """Return the figures of the run's result. evaluations: figures by moment."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRun:
    """A run's folder and this process's part in the run."""

    folder: Path
    ranks: Ranks
    journal: Journal | NullJournal
    """Only the first rank has a journal and writes the folder."""
    stop: StopSignal
    observer: Observer

    def complete(self, config: RunConfig, load: Callable[[], Training]) -> dict[str, Any]:
        """Return the stored result of a complete run; load any other run, continue it and return its result.
        The journal must have been started."""
        folder, report = self.folder, self.folder / "report.html"
        result = self.ranks.from_first(lambda: self.journal.result)
        if result is not None:
            more = "continue it with a larger --num-steps, or start another with --out"
            self.journal.notice(f"{folder}: this run is already complete; {more}")
            self.journal.catch_up()
            has_report = report.exists()  # not if, for instance, the disk was full
        else:
            check_vanished(folder, self.journal, accepts_changes=config.accept_changes)
            result, has_report = Session(self, load()).run(), False
            self.journal.finish(result)
        if self.ranks.is_first and not has_report:
            write_report([folder], report)
        return result


@contextlib.contextmanager
def open_run(config: RunConfig, ranks: Ranks, observer: Observer | None) -> Iterator[OpenRun]:
    """Open the folder config.out and handle signals. The observer follows the steps of a run that is not
    complete yet."""
    folder = Path(config.out)
    with Journal(folder, num_steps=config.num_steps) if ranks.is_first else NullJournal() as journal:
        stop = StopSignal(journal.notice, echo_s=0.0 if ranks.count == 1 else ECHO_S)
        with stop.handling():
            yield OpenRun(folder, ranks, journal, stop, observer or NullObserver())


class Session:
    """One process's part of a run, from the loaded model to the last evaluation."""

    def __init__(self, run: OpenRun, training: Training):
        self._run, self._training = run, training
        self._checkpoints = RunCheckpoints(
            run.folder, training.config.checkpoint, training.learner, run.journal, run.ranks
        )
        self._path = run.folder / "evaluations.json"
        self._before_s: float | None = None
        self._evaluations: dict[str, Any] = run.ranks.from_first(
            lambda: read_object(self._path) if self._path.exists() else {}
        )

    def run(self) -> dict[str, Any]:
        """Run to the end and return the result; raise SystemExit once a signal has stopped it."""
        ranks, stop, training = self._run.ranks, self._run.stop, self._training
        first_step = self.resume()
        self._run.observer.begin(first_step)
        if first_step == 0:
            for moment in training.evaluations_before:
                self.evaluate(moment)
        self._expect_end()
        ranks.take_traffic()  # that of a step begins with it
        with stop.deferred():
            with self._checkpoints:
                try:
                    training.run_steps(first_step, self.end_step)
                except RankLost:
                    self._checkpoints.save_finished()
                    raise
            if stop.requested is not None:
                self._checkpoints.notice_saved()
        if stop.requested is not None:  # also by a signal that came after the look above
            raise SystemExit(stop.exit_code)
        if training.evaluations_before:
            self.evaluate("after")
        train_s = ranks.from_first(lambda: sum(step["step_s"] for step in self._run.journal.steps()))
        figures = training.result(self._evaluations)
        return {**figures, "train_s": round(train_s, 1), "run": str(self._run.folder)}

    def load(self) -> tuple[int, list[str]]:
        """Load the newest intact checkpoint, or the adapter that the run begins with. Return the step to
        continue with, and notices of the checkpoint."""
        training, config = self._training, self._training.config
        resumed = self._checkpoints.load_latest()
        if resumed is not None:
            training.load(resumed.extra)
            return resumed.next_step, resumed.notices
        if self._run.ranks.is_first:
            with self._run.journal.work("comparing the quantized weights with the original ones"):
                lines = list(filter(None, training.quantization_lines()))
            for line in lines:
                self._run.journal.notice(line)
        if config.adapter.init_from is not None:
            load_adapter(training.decoder, read_adapter(config.adapter.init_from, config.adapter))
        return 0, []

    def resume(self) -> int:
        """Load, cut the folder's files at the step to continue with, and return it."""
        journal, training = self._run.journal, self._training
        first_step, notices = self.load()
        for notice in [*notices, *training.engine.notices]:
            journal.notice(notice)
        evaluations = self._evaluations_at(first_step)
        journal.resume(first_step)
        training.sampler.publish(training.learner.version)
        if first_step and training.evaluations_before and "before" not in self._evaluations:
            journal.notice("evaluations.json has no evaluation from before the first step")
        if self._evaluations != evaluations:
            self._evaluations = evaluations
            self._write_evaluations()
        return first_step

    def _evaluations_at(self, first_step: int) -> dict[str, Any]:
        """Return the evaluations that are valid at this step: at the first one those before training, and
        none that belong to an earlier config. If num_steps was raised, the one after training gets the number
        of its steps in its name; if steps before it are repeated, as a later checkpoint is gone, it is
        dropped."""
        if first_step == 0:
            is_same = self._run.ranks.from_first(lambda: self._run.journal.is_same_run)
            moments = self._training.evaluations_before if is_same else ()
            return {moment: self._evaluations[moment] for moment in moments if moment in self._evaluations}
        valid = dict(self._evaluations)
        if first_step < self._training.config.num_steps and "after" in valid:
            after = valid.pop("after")
            if self._run.journal.last_saved <= first_step:
                valid[f"after_{first_step}_steps"] = after
        return valid

    def _write_evaluations(self) -> None:
        if self._run.ranks.is_first:
            write_atomic(self._path, encode(self._evaluations, indent=2))

    def _expect_end(self) -> None:
        """Tell the journal how long the evaluation after the last step takes: as long as that before it all,
        or no time if it is a part of that step. The first step's line has its time if an earlier process made
        it."""
        recorded, config = next(self._run.journal.steps(), {}).get("evaluate_s", 0.0), self._training.config
        if self._training.evaluations_before and not evaluates_after(config.evaluate, config.num_steps - 1):
            self._run.journal.expect(end_s=self._before_s or recorded)

    def evaluate(self, moment: str) -> None:
        """Measure the held-out figures, once even if the run is resumed; those after training unless the last
        step has them."""
        if moment in self._evaluations:
            return
        begin, training = time.perf_counter(), self._training
        figures = self._last_figures() if moment == "after" else {}
        figures = self._evaluations[moment] = figures or training.evaluate(moment)
        if moment == "before":
            self._before_s = time.perf_counter() - begin
        self._write_evaluations()
        self._run.journal.notice(training.evaluation_text(moment, figures))

    def _last_figures(self) -> dict[str, float]:
        """Return the held-out figures after the last step's update; {} if they were not measured, or are not
        finite."""
        line = self._run.ranks.from_first(lambda: self._run.journal.last_line)
        figures = self._training.recorded_figures(line)
        return {} if None in figures.values() else figures

    def end_step(self, step: int, metrics: dict[str, float]) -> bool:
        """Save if due; return True if the run is to stop here. A signal to any rank stops all of them, after
        the first one has saved."""
        ranks, stop, observer = self._run.ranks, self._run.stop, self._run.observer
        next_step, state = step + 1, self._training.state()
        self._checkpoints.finished(next_step, state)
        request = observer.after_step(step, metrics)
        requests = ranks.gather((stop.requested or 0, request.save, request.stop))
        requested, asks_save, asks_stop = map(max, zip(*requests, strict=True))  # a later signal: next step
        is_due = self._checkpoints.is_due(next_step, self._training.config.num_steps)
        saves = bool(requested or asks_save or asks_stop or is_due)
        if saves:
            self._checkpoints.save(next_step, state, waits=observer.reads_checkpoints)
        observer.finished(step, is_saved=saves)
        ranks.take_traffic()
        if requested:
            ranks.gather(None)
            stop.request(requested)  # when one rank ends, torchrun signals the others
        return bool(requested or asks_stop)


def evaluates_after(config: EvalConfig, step: int) -> bool:
    """True if held-out figures are due after this step."""
    return config.every is not None and (step + 1) % config.every == 0
