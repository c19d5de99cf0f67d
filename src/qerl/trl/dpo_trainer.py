"""DPOTrainer and KTOTrainer of TRL over `qerl dpo`."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from qerl.algo.preference import DIVERGENCES, PAIR_LOSSES
from qerl.config import DpoConfig, RunConfig
from qerl.config.dpo import UNPAIRED
from qerl.errors import require
from qerl.tasks.rows.preferences import check_preference_columns
from qerl.training.dpo import PreferenceTuning
from qerl.trl.config import DPOConfig, KTOConfig, PreferenceFields
from qerl.trl.ignored import DPOIgnoredFields, IgnoredFields, KTOIgnoredFields, ignored
from qerl.trl.refused import DPORefusedFields, KTORefusedFields, RefusedFields, check_refused
from qerl.trl.rows_trainer import BASE, RowsTrainer, check_unused
from qerl.trl.run_trainer import Rows
from qerl.trl.translate import one_of

_ORDERS = {"random": "random", "sequential": "sequential"}


class PreferenceTrainer(RowsTrainer):
    kind = PreferenceTuning
    config_class: ClassVar[type[PreferenceFields]]
    kinds: ClassVar[tuple[type[IgnoredFields], type[RefusedFields]]]

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | Mapping[str, Rows] | None = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        base: RunConfig | None = None,
    ):
        """`model` is a folder, a hub id, a PreTrainedModel or a PeftModel, whose adapter is the reference
        then. `train_dataset` is a datasets.Dataset or a list of rows, as of `qerl dpo` (docs/sft.md). `base`
        has the fields that TRL does not, such as model.format and adapter; the default has NVFP4 weights."""
        self.args = args or self.config_class()
        require(
            isinstance(self.args, self.config_class),
            f"args must be a qerl.trl.{self.config_class.__name__}, got a {type(self.args).__name__}",
        )
        no_effect, refused = self.kinds
        check_refused(self.args, refused)
        check_unused(
            optimizers, ref_model=ref_model, data_collator=data_collator, compute_metrics=compute_metrics
        )
        self.model, self.processing_class = model, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        base = self._based(base or BASE, quantization_config, peft_config)
        if self.args.disable_dropout:
            base = dataclasses.replace(base, adapter=dataclasses.replace(base.adapter, dropout=0.0))
        batch = self._prepare(base, Path(str(self.args.output_dir)))
        self._start(batch, ignored(self.args, no_effect), callbacks or ())

    def _loss(self) -> DpoConfig:
        """Return the loss that the config says."""
        raise NotImplementedError

    def _with_rows(
        self, base: RunConfig, first: dict[str, Any], data: str, eval_data: str | None
    ) -> RunConfig:
        dpo = self._loss()
        check_preference_columns("train_dataset", list(first), is_paired=dpo.is_paired)
        is_enough = self._size > 1 or not dpo.has_kl
        require(is_enough, f"loss_type kto needs batches of at least 2 rows, got {self._size}")
        sft = dataclasses.replace(
            base.sft,
            data=data,
            split="train",
            eval_data=eval_data,
            eval_fraction=0.0,
            num_train_epochs=self.args.num_train_epochs,
            max_length=self.args.max_length,
        )
        return dataclasses.replace(base, sft=sft, dpo=dpo)


class DPOTrainer(PreferenceTrainer):
    method = "DPO"
    config_class = DPOConfig
    kinds = DPOIgnoredFields, DPORefusedFields

    def _loss(self) -> DpoConfig:
        args = self.args
        known = {name: name for name in PAIR_LOSSES}
        return DpoConfig(
            loss_type=tuple(one_of("loss_type", name, known) for name in args.loss_type),
            loss_weights=tuple(args.loss_weights or ()),
            beta=args.beta,
            label_smoothing=args.label_smoothing,
            f_divergence_type=one_of(
                "f_divergence_type", args.f_divergence_type, {name: name for name in DIVERGENCES}
            ),
            f_alpha_divergence_coef=args.f_alpha_divergence_coef,
            discopop_tau=args.discopop_tau,
            order=one_of("train_sampling_strategy", args.train_sampling_strategy, _ORDERS),
        )


class KTOTrainer(PreferenceTrainer):
    method = "KTO"
    config_class = KTOConfig
    kinds = KTOIgnoredFields, KTORefusedFields

    def _loss(self) -> DpoConfig:
        args = self.args
        return DpoConfig(
            loss_type=(one_of("loss_type", args.loss_type, {name: name for name in UNPAIRED}),),
            beta=args.beta,
            desirable_weight=args.desirable_weight,
            undesirable_weight=args.undesirable_weight,
            order=one_of("train_sampling_strategy", args.train_sampling_strategy, _ORDERS),
        )
