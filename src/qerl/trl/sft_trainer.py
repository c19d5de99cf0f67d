"""SFTTrainer of TRL over `qerl sft`."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.config import AlgoConfig, NoiseConfig, RunConfig, SampleConfig, SftConfig
from qerl.errors import require
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.tasks.rows.demonstrations import check_columns, form_of
from qerl.training.sft import fine_tune, held_out_loss, read_rows
from qerl.trl.config import SFTConfig
from qerl.trl.data import write_rows
from qerl.trl.ignored import SFTIgnoredFields, ignored
from qerl.trl.refused import SFTRefusedFields, check_refused
from qerl.trl.run_trainer import Rows, RunTrainer, all_rows, num_rows
from qerl.trl.translate import Batch, length, plain, shared_config
from qerl.trl.weights import with_template

_BASE = RunConfig(noise=NoiseConfig(schedule="none"), sample=SampleConfig(max_tokens=128))
_UNUSED = {
    "data_collator": "rows are packed without padding",
    "compute_loss_func": "the loss is the cross entropy",
    "compute_metrics": "evaluation measures the loss",
    "preprocess_logits_for_metrics": "evaluation measures the loss",
    "optimizer_cls_and_kwargs": "set optim, learning_rate and lr_scheduler_type in SFTConfig",
}


class SFTTrainer(RunTrainer):
    method = "SFT"

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        *,
        base: RunConfig | None = None,
    ):
        """`model` is a folder, a hub id, a PreTrainedModel or a PeftModel. `train_dataset` is a
        datasets.Dataset or a list of rows: messages, prompt and completion, or a text, as of `qerl sft`
        (docs/sft.md). `base` has the fields that TRL does not, such as model.format, sft.num_eval_samples and
        adapter; the default has NVFP4 weights."""
        self.args = args or SFTConfig()
        require(
            isinstance(self.args, SFTConfig),
            f"args must be a qerl.trl.SFTConfig, got a {type(self.args).__name__}",
        )
        check_refused(self.args, SFTRefusedFields)
        unused = {
            "data_collator": data_collator,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
        }
        unused["optimizers"] = next((part for part in optimizers or () if part is not None), None)
        for name, value in unused.items():
            why = _UNUSED.get(name, _UNUSED["optimizer_cls_and_kwargs"])
            require(value is None, f"{name} is not supported: {why}")
        self.model = model
        self.processing_class = with_template(
            model, processing_class, self.args.chat_template_path, self.args.eos_token
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._formatting_func = formatting_func
        base = self._based(base or _BASE, quantization_config, peft_config)
        batch = self._prepare(base, Path(str(self.args.output_dir)))
        self._start(batch, ignored(self.args, SFTIgnoredFields), callbacks)

    def _prepare(self, base: RunConfig, folder: Path) -> Batch:
        """Write the rows, read them as the run will, and set `config`."""
        args = self.args
        self._size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        eval_rows = None if plain(args.eval_strategy) == "no" else all_rows(self.eval_dataset)
        held_out = None if eval_rows is None else self._write_eval_rows(eval_rows, folder)
        rows = [*self._formatted(itertools.islice(self.train_dataset or (), self._max_rows()))]
        path = write_rows("train_dataset", rows, folder)
        num_held_out = 0 if held_out is None else num_rows(held_out)
        config = dataclasses.replace(
            base,
            out=str(folder),
            seed=args.seed,
            num_prompts=self._size,
            noise=NoiseConfig(schedule="none"),
            algo=AlgoConfig(loss_type="nll", importance="none"),
            sft=self._sft(base.sft, rows[0], str(path), None if held_out is None else str(held_out)),
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
        require(not args.packing, "packing needs a train_dataset with a length: blocks are made of all rows")
        return args.max_steps * self._size

    def _formatted(self, rows: Rows) -> Rows:
        """Yield the rows, or the texts of formatting_func if there is one."""
        for row in rows:
            formatted = self._formatting_func
            yield row if formatted is None else {self.args.dataset_text_field: formatted(dict(row))}

    def _write_eval_rows(self, rows: Rows, folder: Path | None = None) -> Path:
        return write_rows("eval_dataset", self._formatted(rows), folder or Path(self.config.out))

    def _sft(self, base: SftConfig, first: dict[str, Any], data: str, eval_data: str | None) -> SftConfig:
        args = self.args
        check_columns("train_dataset", list(first), args.dataset_text_field, "dataset_text_field")
        form, _ = form_of(first, args.dataset_text_field) or ("", ())
        if form == "completion":
            learns_part = args.completion_only_loss is not False or args.assistant_only_loss
        else:
            require(
                not args.completion_only_loss,
                "completion_only_loss = True needs rows with prompt and completion: remove it",
            )
            learns_part = args.assistant_only_loss
        require(
            form != "text" or not args.assistant_only_loss,
            "assistant_only_loss = True needs rows with messages: remove it",
        )
        return dataclasses.replace(
            base,
            data=data,
            split="train",
            eval_data=eval_data,
            eval_fraction=0.0,
            num_train_epochs=args.num_train_epochs,
            max_length=args.max_length,
            packing=args.packing,
            assistant_only_loss=learns_part,
            text_column=args.dataset_text_field,
        )

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
        return fine_tune(self.config, max_steps=num_steps, observer=self._observer, rows=self._rows)

    def _held_out(self, path: Path, num_rows: int) -> dict[str, float]:
        begin_s = time.perf_counter()
        loss, count = held_out_loss(self.config, str(path))
        runtime_s = time.perf_counter() - begin_s
        return {
            "loss": loss,
            "num_rows": count,
            "runtime": round(runtime_s, 3),
            "samples_per_second": round(count / runtime_s, 3),
        }
