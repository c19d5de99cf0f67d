"""The part that SFTTrainer, DPOTrainer and KTOTrainer share: the run's rows, its steps and its figures."""

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl.config import AlgoConfig, NoiseConfig, RunConfig, SampleConfig
from qerl.errors import require
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.training.sft import StoredTraining, fine_tune, held_out_figures, read_rows
from qerl.trl.data import write_rows
from qerl.trl.run_trainer import Rows, RunTrainer, all_rows, num_rows
from qerl.trl.translate import Batch, length, plain, shared_config

BASE = RunConfig(noise=NoiseConfig(schedule="none"), sample=SampleConfig(max_tokens=128))
_OPTIMIZER = "set optim, learning_rate and lr_scheduler_type in the config"
_UNUSED = {
    "data_collator": "rows are packed without padding",
    "compute_loss_func": "the loss is that of the config",
    "compute_metrics": "evaluation measures the loss",
    "preprocess_logits_for_metrics": "evaluation measures the loss",
    "ref_model": "the reference is the model with its adapter off, or with the adapter that it begins with",
}


def check_unused(optimizers: Sequence[Any] | None, **arguments: Any) -> None:
    """Raise UserError for the first of the trainer's arguments, which have no place here, that is given."""
    arguments["optimizers"] = next((part for part in optimizers or () if part is not None), None)
    for name, value in arguments.items():
        require(value is None, f"{name} is not supported: {_UNUSED.get(name, _OPTIMIZER)}")


class RowsTrainer(RunTrainer):
    """A trainer of stored rows. A subclass says what is learned, and how its config is translated."""

    kind: type[StoredTraining[Any]]
    train_dataset: Rows | None

    def _formatted(self, rows: Rows) -> Rows:
        """Return the rows as they are written."""
        return rows

    def _with_rows(
        self, base: RunConfig, first: dict[str, Any], data: str, eval_data: str | None
    ) -> RunConfig:
        """Return base with where the rows are and what is learned from them. first: the first row."""
        raise NotImplementedError

    def _prepare(self, base: RunConfig, folder: Path) -> Batch:
        """Write the rows, read them as the run will, and set `config`."""
        args = self.args
        self._size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        eval_rows = None if plain(args.eval_strategy) == "no" else all_rows(self.eval_dataset)
        held_out = None if eval_rows is None else self._write_eval_rows(eval_rows, folder)
        rows = [*self._formatted(itertools.islice(self.train_dataset or (), self._max_rows()))]
        path = write_rows("train_dataset", rows, folder)
        num_held_out = 0 if held_out is None else num_rows(held_out)
        eval_data = None if held_out is None else str(held_out)
        config = dataclasses.replace(
            self._with_rows(base, dict(rows[0]), str(path), eval_data),
            out=str(folder),
            seed=args.seed,
            num_prompts=self._size,
            noise=NoiseConfig(schedule="none"),
            algo=AlgoConfig(loss_type="nll", importance="none"),
            evaluate=dataclasses.replace(base.evaluate, num_prompts=num_held_out),
        )
        self._rows = read_rows(config, load_tokenizer(config.model.path))
        batch = self._batch()
        self.config = shared_config(args, config, batch, num_held_out=num_held_out)
        return batch

    def _max_rows(self) -> int | None:
        """Return the number of rows that a stream must give; None for a data set."""
        args = self.args
        if self.train_dataset is None or length(self.train_dataset) is not None:
            return None
        require(args.max_steps > 0, "max_steps must be set: train_dataset has no length")
        return args.max_steps * self._size

    def _write_eval_rows(self, rows: Rows, folder: Path | None = None) -> Path:
        return write_rows("eval_dataset", self._formatted(rows), folder or Path(self.config.out))

    def _batch(self) -> Batch:
        """Return the steps, one update each; the last of an epoch has the rows that are left."""
        per_epoch = self._rows.steps_per_epoch(self._size)
        epochs = math.ceil(self.args.num_train_epochs * per_epoch)
        return Batch(
            num_prompts=self._size,
            updates_per_step=1,
            num_iterations=1,
            num_steps=self.args.max_steps if self.args.max_steps > 0 else epochs,
            steps_per_epoch=per_epoch,
        )

    def _train(self) -> dict[str, Any]:
        num_steps = self.config.num_steps
        return fine_tune(
            self.config, max_steps=num_steps, observer=self._observer, rows=self._rows, kind=self.kind
        )

    def _held_out(self, path: Path, num_rows: int) -> dict[str, float]:
        begin_s = time.perf_counter()
        figures, count = held_out_figures(self.config, str(path), self.kind)
        runtime_s = time.perf_counter() - begin_s
        return {
            **{"loss" if name == "nll" else name: value for name, value in figures.items()},
            "num_rows": count,
            "runtime": round(runtime_s, 3),
            "samples_per_second": round(count / runtime_s, 3),
        }
