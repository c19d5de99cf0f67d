"""Pass a run's steps to transformers callbacks, with the state and the logs that a Trainer gives them.

    on_init_end  on_train_begin  (on_step_begin  on_step_end  on_log  on_evaluate  on_save)  ...  on_train_end

on_epoch_begin and on_epoch_end are called around the steps of a pass over the rows. global_step counts
updates, of which a step may make several; steps before a resumed one are in log_history without calls. A log
entry has the mean of each metric since the last one.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from qerl.errors import require
from qerl.tracking.json_lines import read_lines
from qerl.training.observer import ObserverRequest
from qerl.trl.config import TrainFields
from qerl.trl.translate import Batch, plain

_OF_TRL = {
    "mean_tokens": "completions/mean_length",
    "cut_fraction": "completions/clipped_ratio",
    "kl_reference": "kl",
    "sampled_tokens": "num_tokens",
    "nll": "loss",
    "eval_nll": "eval_loss",
}
"""TRL's names, beside those of docs/metrics.md."""
_OF_OPTIMIZER = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
_NOT_CALLED = ("on_prediction_step", "on_predict", "on_push_begin")


class CallbackObserver:
    """The observer of a run; see qerl.training.observer."""

    def __init__(self, callbacks: Iterable[Any], args: TrainFields, batch: Batch, folder: Path, **parts: Any):
        """parts: what callbacks receive by name, such as processing_class."""
        self.callbacks = [as_callback(callback) for callback in callbacks]
        self.log: Callable[[dict[str, float]], None] = self.record
        """Receives the entries of a step."""
        self.control, self._parts = TrainerControl(), parts
        self._args, self._batch, self._folder = args, batch, folder
        self._every = batch.every(plain(args.logging_strategy), args.logging_steps)
        self.state = TrainerState(max_steps=batch.num_steps * batch.updates)
        self._pending: list[dict[str, float]] = []
        self.has_begun = False
        """False if the run was complete before."""
        self._clear()

    @property
    def reads_checkpoints(self) -> bool:
        """True if a callback has an on_save of its own."""
        return any(type(each).on_save is not TrainerCallback.on_save for each in self.callbacks)

    def call(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            parts = self._parts | more
            self.control = (
                getattr(callback, event)(self._args, self.state, self.control, **parts) or self.control
            )

    def _clear(self) -> None:
        self.state.log_history, self._pending = [], []
        self.state.global_step, self.state.epoch = 0, 0.0

    def restore(self, first_step: int | None = None) -> None:
        """Set the state to that after the recorded steps, or those before first_step."""
        self._clear()
        path = self._folder / "metrics.jsonl"
        for record in read_lines(path) if path.exists() else ():
            if first_step is None or record["step"] < first_step:
                for entry in self._advance(record.pop("step"), record):
                    self._keep(entry)

    def _advance(self, step: int, metrics: dict[str, Any]) -> list[dict[str, float]]:
        """Return the new entries of log_history: the mean of the latest steps, and an evaluation."""
        batch, state = self._batch, self.state
        state.global_step = (step + 1) * batch.updates
        state.epoch = (step + 1) / max(1, batch.steps_per_epoch)
        held_out = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        self._pending.append({name: value for name, value in metrics.items() if name not in held_out})
        entries = []
        if self._every is not None and ((step + 1) % self._every == 0 or self.control.should_log):
            entries.append(_means(self._pending))
            self._pending = []
        entries += [_with_names_of_trl(held_out)] if held_out else []
        return entries

    def _keep(self, entry: dict[str, float]) -> dict[str, float]:
        entry = entry | {"epoch": self.state.epoch, "step": self.state.global_step}
        self.state.log_history.append(entry)
        return entry

    def record(self, entry: dict[str, float]) -> None:
        """Add an entry to log_history and give it to the callbacks."""
        self.call("on_log", logs=self._keep(entry))

    def begin(self, first_step: int) -> None:
        self.restore(first_step)
        self.has_begun = True
        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self.call(event)

    def _ends_epoch(self, step: int) -> bool:
        per_epoch = self._batch.steps_per_epoch
        return step + 1 == self._batch.num_steps or (per_epoch > 0 and (step + 1) % per_epoch == 0)

    def after_step(self, step: int, metrics: dict[str, float]) -> ObserverRequest:
        self.control.should_log = self.control.should_save = False
        self.state.global_step = (step + 1) * self._batch.updates
        self.call("on_step_end")
        for entry in self._advance(step, metrics):
            self.log(entry)
            if any(name.startswith("eval_") for name in entry):
                self.call("on_evaluate", metrics=self.state.log_history[-1])
        if self._ends_epoch(step) or self.control.should_training_stop:
            self.call("on_epoch_end")
        return ObserverRequest(save=self.control.should_save, stop=self.control.should_training_stop)

    def finished(self, step: int, is_saved: bool) -> None:
        if is_saved:
            self.call("on_save")
        if not self.control.should_training_stop and step + 1 < self._batch.num_steps:
            for event in ("on_epoch_begin",) * self._ends_epoch(step) + ("on_step_begin",):
                self.call(event)


def as_callback(callback: Any) -> Any:
    """Return an object of a callback's class, or the object; raise UserError for events of the optimizer."""
    callback = callback() if isinstance(callback, type) else callback
    for event in _overridden(callback, _OF_OPTIMIZER):
        require(False, f"{event} is not supported: callbacks get no optimizer; use on_step_end")
    return callback


def not_called(callbacks: Iterable[Any]) -> list[str]:
    """Return ["RichProgressCallback.on_predict"]: the callbacks' methods that no run calls."""
    return [event for callback in callbacks for event in _overridden(callback, _NOT_CALLED)]


def _overridden(callback: Any, events: Iterable[str]) -> list[str]:
    kind = type(callback)
    triples = ((name, getattr(kind, name, None), getattr(TrainerCallback, name, None)) for name in events)
    return [f"{kind.__name__}.{name}" for name, method, default in triples if method not in (None, default)]


def _means(records: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record)
    means = {
        name: fmean(value for record in records if (value := record.get(name)) is not None)
        for name in names
        if any(record.get(name) is not None for record in records)
    }
    return _with_names_of_trl(means)


def _with_names_of_trl(values: dict[str, float]) -> dict[str, float]:
    named = {theirs: values[ours] for ours, theirs in _OF_TRL.items() if ours in values}
    return values | named
