"""SFTTrainer of TRL over `qerl sft`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerl.config import RunConfig
from qerl.errors import require
from qerl.tasks.rows.demonstrations import check_columns, form_of
from qerl.training.sft import FineTuning
from qerl.trl.config import SFTConfig
from qerl.trl.ignored import SFTIgnoredFields, ignored
from qerl.trl.refused import SFTRefusedFields, check_refused
from qerl.trl.rows_trainer import BASE, RowsTrainer, check_unused
from qerl.trl.run_trainer import Rows
from qerl.trl.translate import length
from qerl.trl.weights import with_template


class SFTTrainer(RowsTrainer):
    kind = FineTuning
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
        check_unused(
            optimizers,
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.model = model
        self.processing_class = with_template(
            model, processing_class, self.args.chat_template_path, self.args.eos_token
        )
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._formatting_func = formatting_func
        base = self._based(base or BASE, quantization_config, peft_config)
        batch = self._prepare(base, Path(str(self.args.output_dir)))
        self._start(batch, ignored(self.args, SFTIgnoredFields), callbacks)

    def _formatted(self, rows: Rows) -> Rows:
        """Yield the rows, or the texts of formatting_func if there is one."""
        for row in rows:
            formatted = self._formatting_func
            yield row if formatted is None else {self.args.dataset_text_field: formatted(dict(row))}

    def _max_rows(self) -> int | None:
        is_stream = self.train_dataset is not None and length(self.train_dataset) is None
        require(
            not (is_stream and self.args.packing and self.args.max_steps > 0),
            "packing needs a train_dataset with a length: blocks are made of all rows",
        )
        return RowsTrainer._max_rows(self)

    def _with_rows(
        self, base: RunConfig, first: dict[str, Any], data: str, eval_data: str | None
    ) -> RunConfig:
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
        sft = dataclasses.replace(
            base.sft,
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
        return dataclasses.replace(base, sft=sft)
