"""Pass a run's steps to transformers callbacks, with the state and the logs that a Trainer gives them.

    on_init_end  on_train_begin  (on_step_begin  on_step_end  on_evaluate  on_log  on_save)  ...  on_train_end

global_step counts updates, of which a step may make several; steps before a resumed one are in log_history
without calls. A log entry has the mean of each metric since the last one.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

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


class CallbackObserver:
    """The observer of a run; see qerl.training.observer."""

    def __init__(self, callbacks: Iterable[Any], args: TrainFields, batch: Batch, folder: Path, **parts: Any):
        """parts: what callbacks receive by name, such as processing_class."""
        self.callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self.control, self._parts = TrainerControl(), parts
        self._args, self._batch, self._folder = args, batch, folder
        self._every = batch.every(plain(args.logging_strategy), args.logging_steps)
        self.state = TrainerState(max_steps=batch.num_steps * batch.updates)
        self._pending: list[dict[str, float]] = []
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
                self._advance(record.pop("step"), record)

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
        at = {"epoch": state.epoch, "step": state.global_step}
        entries = [entry | at for entry in entries]
        state.log_history += entries
        return entries

    def begin(self, first_step: int) -> None:
        self.restore(first_step)
        self.call("on_train_begin")
        self.call("on_step_begin")

    def after_step(self, step: int, metrics: dict[str, float]) -> ObserverRequest:
        self.control.should_log = self.control.should_save = False
        self.state.global_step = (step + 1) * self._batch.updates
        self.call("on_step_end")
        for entry in self._advance(step, metrics):
            if any(name.startswith("eval_") for name in entry):
                self.call("on_evaluate", metrics=entry)
            self.call("on_log", logs=entry)
        return ObserverRequest(save=self.control.should_save, stop=self.control.should_training_stop)

    def finished(self, step: int, is_saved: bool) -> None:
        if is_saved:
            self.call("on_save")
        if not self.control.should_training_stop and step + 1 < self._batch.num_steps:
            self.call("on_step_begin")


def _means(records: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for record in records for name in record)
    means = {
        name: fmean(value for record in records if (value := record.get(name)) is not None)
        for name in names
        if any(record.get(name) is not None for record in records)
    }
    return _with_names_of_trl(means)


def _with_names_of_trl(values: dict[str, float]) -> dict[str, float]:
    return values | {theirs: values[ours] for ours, theirs in _OF_TRL.items() if ours in values}
