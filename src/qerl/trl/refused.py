"""Fields of TRL 1.16's configs that would change the result and are not implemented: any
value but the ones here is refused, with what to do."""

import dataclasses
from typing import Any

from qerl.errors import UserError


@dataclasses.dataclass(kw_only=True)
class RefusedFields:
    optim_args: str | None = None
    optim_target_modules: None | str | list[str] = None  # noqa: RUF036 (HfArgumentParser's order)
    neftune_noise_alpha: float | None = None
    load_best_model_at_end: bool = False
    router_aux_loss_coef: float | None = None


@dataclasses.dataclass(kw_only=True)
class GRPORefusedFields(RefusedFields):
    shuffle_dataset: bool | None = True
    repetition_penalty: float = 1.0
    vllm_structured_outputs_regex: str | None = None
    delta: float | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    sync_ref_model: bool = False
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    off_policy_mask_threshold: float | None = None


@dataclasses.dataclass(kw_only=True)
class SFTRefusedFields(RefusedFields):
    dataset_kwargs: dict[str, Any] | str | None = None
    truncation_mode: str = "keep_start"
    packing_strategy: str = "bfd"
    loss_type: str = "nll"
    label_smoothing_factor: float = 0.0
    dataloader_drop_last: bool = False
    train_sampling_strategy: str = "random"


@dataclasses.dataclass(kw_only=True)
class KTORefusedFields(RefusedFields):
    sync_ref_model: bool = False
    label_smoothing_factor: float = 0.0
    dataloader_drop_last: bool = False


@dataclasses.dataclass(kw_only=True)
class DPORefusedFields(KTORefusedFields):
    truncation_mode: str = "keep_start"
    ld_alpha: float | None = None
    use_weighting: bool = False


_CLIPPED = "the loss is clipped by epsilon and epsilon_high; a KL penalty is beta"
_ENTROPY = "raise temperature, or set noise in base=RunConfig(noise=...)"
_ADVICE = {
    "optim_args": "remove it; adam_beta1, adam_beta2, adam_epsilon and weight_decay are supported",
    "optim_target_modules": "remove it; the optimizer updates the LoRA adapter of peft_config.target_modules",
    "neftune_noise_alpha": "remove it; base=RunConfig(noise=...) has noise in the norms",
    "load_best_model_at_end": "remove it; the newest checkpoint is loaded",
    "router_aux_loss_coef": "remove it or set 0.0; routers are trained without an auxiliary loss",
    "shuffle_dataset": "remove it; rows are drawn in a random order by seed",
    "repetition_penalty": "remove it; the learner's policy has no penalty. Penalize in a reward function",
    "vllm_structured_outputs_regex": "remove it; reward the form in a reward function",
    "delta": f"remove it; {_CLIPPED}",
    "multi_objective_aggregation": "use sum_then_normalize with reward_weights",
    "sync_ref_model": "remove it; the reference is the model without adapter",
    "top_entropy_quantile": "set 1.0; all tokens are learned from",
    "entropy_coef": f"set 0.0; {_ENTROPY}",
    "use_adaptive_entropy": f"remove it; {_ENTROPY}",
    "off_policy_mask_threshold": "remove it; base=RunConfig(algo=AlgoConfig(reject=...)) rejects samples",
    "dataset_kwargs": "remove it; the trainer prepares the rows: messages, prompt and completion, or texts",
    "truncation_mode": "use keep_start",
    "packing_strategy": "use bfd; no row is split",
    "loss_type": "use nll",
    "label_smoothing_factor": "set 0.0; the loss has no smoothed labels of tokens",
    "dataloader_drop_last": "remove it; the last update of an epoch has the rows that are left",
    "ld_alpha": "remove it; all tokens of a completion count alike, or use loss_type sigmoid_norm",
    "use_weighting": "remove it; every pair counts alike",
    "train_sampling_strategy": "use random; rows are drawn in a random order by seed",
}
_ALSO_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "router_aux_loss_coef": (0.0,),
    "dataset_kwargs": ({}, {"skip_prepare_dataset": False}),
    "loss_type": ("chunked_nll",),
}


def check_refused(args: RefusedFields, kind: type[RefusedFields]) -> None:
    """Raise UserError for the first field of `kind`, one of the classes above, that is not at a value that is
    accepted."""
    for field in dataclasses.fields(kind):
        value = getattr(args, field.name)
        if value != field.default and value not in _ALSO_ACCEPTED.get(field.name, ()):
            raise UserError(f"{field.name} = {value!r} is not supported: {_ADVICE[field.name]}")
