"""The part that all trainers share: the run's state and callbacks, saving, the hub."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import TrainOutput

from qerl.config import RunConfig
from qerl.config.stored import with_stored_base
from qerl.errors import RunError, UserError, require
from qerl.export.adapter_card import base_section, read_written_adapter
from qerl.export.write import write_merged, write_peft
from qerl.learner import checkpoint
from qerl.models.checkpoint.source import locate
from qerl.models.hf_writer import write_tokenizer
from qerl.trl.callbacks import CallbackObserver, as_callback, not_called
from qerl.trl.data import write_rows
from qerl.trl.hub import model_card, push_folder
from qerl.trl.lora import adapter_config
from qerl.trl.model import model_config, model_path
from qerl.trl.overrides import NAMES, check_overrides
from qerl.trl.translate import Batch

_logger = logging.getLogger("qerl.trl")
Rows = Iterable[dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class MainProcess:
    """The part of TRL's trainer.accelerator that scripts use."""

    is_main_process: bool = True
    num_processes: int = 1
    process_index: int = 0

    def print(self, *values: Any, **options: Any) -> None:
        print(*values, **options)


class RunTrainer:
    """A trainer of transformers over a run of qerl. A subclass sets these attributes and calls `_start`, and
    says how to train and to evaluate."""

    args: Any
    config: RunConfig
    model: Any
    processing_class: Any
    eval_dataset: Rows | Mapping[str, Rows] | None
    method: str
    """The method's name on a model card."""

    def _based(self, base: RunConfig, quantization_config: Any, peft_config: Any) -> RunConfig:
        """Return base with the trainer's model and adapter."""
        check_overrides(self)
        path, adapter = model_path(self.model, self.processing_class, Path(str(self.args.output_dir)))
        is_named = isinstance(self.model, str)
        stored = None if is_named else getattr(self.model.config, "quantization_config", None)
        model = model_config(path, quantization_config or stored, self.args, base.model)
        is_once = adapter is None or peft_config is None
        require(is_once, "peft_config: the PeftModel has an adapter already; pass its base model, or none")
        return dataclasses.replace(
            base, model=model, adapter=adapter or adapter_config(peft_config, base.adapter, model)
        )

    def _start(self, batch: Batch, ignored: list[str], callbacks: Sequence[Any]) -> None:
        """Name what has no effect, and make the observer that calls the callbacks."""
        args, folder = self.args, Path(self.config.out)
        if ignored:
            _logger.warning("%s: no effect here: %s", type(args).__name__, ", ".join(ignored))
        self.accelerator, self.hub_model_id = MainProcess(), args.hub_model_id or folder.resolve().name
        parts = {"model": self.model, "processing_class": self.processing_class}
        self._observer = CallbackObserver(callbacks or (), args, batch, folder, **parts)
        self._observer.log = self.log
        if names := not_called(self._observer.callbacks):
            _logger.warning("callbacks: no effect here: %s", ", ".join(names))
        self._observer.call("on_init_end")

    def __getattr__(self, name: str) -> Any:
        where = f"{type(self).__name__}.{name}"
        raise AttributeError(f"{where} is not supported" if name in NAMES else f"there is no {where}")

    def _train(self) -> dict[str, Any]:
        """Train with the observer, or resume; return the run's result."""
        raise NotImplementedError

    def _held_out(self, path: Path, num_rows: int) -> dict[str, float]:
        """Return the metrics of these rows with the newest checkpoint, or of the model before training."""
        raise NotImplementedError

    @property
    def state(self) -> Any:
        """transformers' TrainerState: log_history, global_step, epoch, max_steps."""
        return self._observer.state

    def add_callback(self, callback: Any) -> None:
        self._observer.callbacks.append(as_callback(callback))

    def remove_callback(self, callback: Any) -> None:
        remaining = [c for c in self._observer.callbacks if c is not callback and type(c) is not callback]
        self._observer.callbacks = remaining

    def pop_callback(self, callback: Any) -> Any:
        """Remove the callback, an object or a class, and return the object; None if it is not there."""
        before = self._observer.callbacks
        self.remove_callback(callback)
        return next((each for each in before if each not in self._observer.callbacks), None)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add an entry to state.log_history and give it to the callbacks; the run calls it for its own."""
        self._observer.record(logs)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train, or resume the run in output_dir, whatever resume_from_checkpoint says; a path must be one of
        its checkpoints, or, where there are none yet, one of another run, with which this one begins."""
        begin_s = time.perf_counter()
        check_overrides(self)
        self._observer.has_begun = False
        _take_checkpoint(resume_from_checkpoint, Path(self.config.out) / "checkpoints")
        with _words_of_trl():
            result = self._train()
        if not self._observer.has_begun:
            _logger.warning("%s is complete: set a larger max_steps or another output_dir", self.config.out)
            self._observer.restore()
        self._observer.call("on_train_end")
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        loss = sum(losses) / len(losses) if losses else 0.0
        metrics = {"train_runtime": round(time.perf_counter() - begin_s, 3), "train_loss": loss, **result}
        return TrainOutput(self.state.global_step, loss, metrics)

    def evaluate(
        self,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the metrics of the newest checkpoint, or of the model before training, on eval_dataset: of
        GRPOTrainer the mean reward and length of samples, of the others the loss; log them."""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None:
            raise UserError("evaluate needs an eval_dataset")
        if isinstance(rows, Mapping):
            each = [
                self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}") for name, part in rows.items()
            ]
            return {name: value for metrics in each for name, value in metrics.items()}
        path = self._write_eval_rows(rows)
        results = self._held_out(path, num_rows(path))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in results.items()}
        self.log(metrics)
        self._observer.call("on_evaluate", metrics=metrics)
        return metrics

    def _write_eval_rows(self, rows: Rows) -> Path:
        return write_rows("eval_dataset", rows, Path(self.config.out))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained adapter in PEFT's format, and the tokenizer, into a folder, by default
        output_dir; with adapter.kind full, the model."""
        out = Path(output_dir or self.config.out)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as temporary:
            folder = Path(temporary) / "model"
            write = write_peft if self.config.adapter.kind == "lora" else write_merged
            config = with_stored_base(self.config, Path(self.config.out))
            write(Path(config.out), config, folder)
            write_tokenizer(folder, locate(config.model.path))
            for file in folder.iterdir():
                os.replace(file, out / file.name)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        *,
        dataset_name: str | None = None,
        model_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> Any:
        """Upload what save_model writes, with a model card, to hub_model_id; return the hub's answer."""
        named = [tags] if isinstance(tags, str) else list(tags or ())
        config = with_stored_base(self.config, Path(self.config.out))
        with tempfile.TemporaryDirectory() as temporary:
            self.save_model(temporary, _internal_call=True)
            is_lora = config.adapter.kind == "lora"
            adapter = read_written_adapter(Path(temporary)) if is_lora else None
            card = model_card(
                model_name or self.hub_model_id.rpartition("/")[2],
                base_model=self.config.model.path,
                dataset=dataset_name,
                method=self.method,
                tags=[*named, self.method.lower(), "qerl"],
                base=adapter and base_section(config.model, Path(config.out), adapter),
            )
            return push_folder(
                Path(temporary),
                self.hub_model_id,
                card=card,
                token=token or self.args.hub_token,
                private=self.args.hub_private_repo,
                revision=revision or self.args.hub_revision,
                commit_message=commit_message,
            )

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        print(f"{split} metrics: " + ", ".join(f"{name} {value}" for name, value in metrics.items()))

    def save_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Write <split>_results.json into output_dir."""
        path = Path(self.config.out) / f"{split}_results.json"
        path.write_text(json.dumps(dict(metrics), indent=2) + "\n")

    def save_state(self) -> None:
        """Write trainer_state.json into output_dir."""
        self.state.save_to_json(str(Path(self.config.out) / "trainer_state.json"))

    def is_world_process_zero(self) -> bool:
        return True

    def is_local_process_zero(self) -> bool:
        return True

    def end(self) -> None:
        """Nothing is left open after train."""


@contextlib.contextmanager
def _words_of_trl() -> Iterator[None]:
    """Say output_dir instead of the option --out in errors."""
    try:
        yield
    except (UserError, RunError) as error:
        text = re.sub(
            r"(choose another folder with|set another) --out\b", "set another output_dir", str(error)
        )
        if text == str(error):
            raise
        raise type(error)(text) from error


def all_rows(rows: Rows | Mapping[str, Rows] | None) -> list[dict[str, Any]] | None:
    """Return the rows of all evaluation sets."""
    if rows is None:
        return None
    return [row for each in (rows.values() if isinstance(rows, Mapping) else [rows]) for row in each]


def num_rows(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _take_checkpoint(wanted: bool | str | None, checkpoints: Path) -> None:
    """Check that the run will resume the checkpoint that was asked for; copy one of another run."""
    if not wanted:
        return
    newest, _ = checkpoint.find_latest(checkpoints)
    if wanted is True:
        require(newest is not None, f"resume_from_checkpoint: {checkpoints} holds no checkpoint")
        return
    path = Path(str(wanted))
    if newest is not None and newest.resolve() == path.resolve():
        return
    damage = checkpoint.find_damage(path)
    require(damage is None, f"resume_from_checkpoint {path}: {damage}")
    if newest is not None:
        raise UserError(
            f"resume_from_checkpoint: {checkpoints} holds {newest.name}, from which the run resumes;"
            " remove the checkpoints after yours, or set another output_dir"
        )
    checkpoint.copy(path, checkpoints)
