"""GRPOConfig, SFTConfig, DPOConfig and KTOConfig: every field of TRL 1.16's, with name, default and meaning.

Plain dataclasses, which TrlParser and HfArgumentParser read and a script may assign to.
"""

import dataclasses
import json
from typing import Any

from qerl.errors import UserError
from qerl.trl.ignored import (
    DPOIgnoredFields,
    GRPOIgnoredFields,
    IgnoredFields,
    KTOIgnoredFields,
    SFTIgnoredFields,
)
from qerl.trl.refused import (
    DPORefusedFields,
    GRPORefusedFields,
    KTORefusedFields,
    RefusedFields,
    SFTRefusedFields,
)

_OBJECTS = (
    "model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "lr_scheduler_kwargs",
    "gradient_checkpointing_kwargs",
    "dataset_kwargs",
)
"""Fields that a command line gives as JSON."""


@dataclasses.dataclass
class TrainFields(IgnoredFields, RefusedFields):
    """The fields that all configs share and that have an effect."""

    output_dir: str | None = None
    """The run's folder; None: trainer_output."""

    _: dataclasses.KW_ONLY

    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    """linear, cosine, cosine_with_min_lr, polynomial, constant or constant_with_warmup."""
    lr_scheduler_kwargs: dict | str | None = None
    """min_lr or min_lr_rate of cosine_with_min_lr, lr_end of polynomial."""
    warmup_steps: float = 0
    """Updates; a value below 1 is a share of all updates."""
    warmup_ratio: float = 0.0
    """Option of older versions of TRL: a share of all updates."""
    optim: str = "adamw_torch_fused"
    """A name of AdamW: those with 8bit keep the moments in 8 bits."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    """0 clips nothing."""
    gradient_checkpointing: bool = True
    """True: as `base` says, which by default recomputes what does not fit. False: recompute nothing."""
    bf16: bool | None = None
    """None: as `base` says."""
    use_cpu: bool = False

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    """Updates."""

    model_init_kwargs: dict[str, Any] | str | None = None
    """quantization_config is used; what says where and how a model is loaded has no effect."""
    seed: int = 42

    report_to: None | str | list[str] = "none"  # noqa: RUF036 (HfArgumentParser's order)
    run_name: str | None = None
    logging_strategy: str = "steps"
    logging_steps: float = 10
    """Updates between two entries of state.log_history; metrics.jsonl has every step."""
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_on_start: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    """None: as `base` says, by default 2."""

    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    """With push_to_hub, `save_model` pushes, whatever the strategy."""
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_revision: str | None = None

    def __post_init__(self):
        self.output_dir = self.output_dir or "trainer_output"
        for name in _OBJECTS:
            if isinstance(value := getattr(self, name, None), str):
                setattr(self, name, _parsed(name, value))


@dataclasses.dataclass
class GRPOConfig(TrainFields, GRPOIgnoredFields, GRPORefusedFields):
    """The fields below and in TrainFields have an effect. docs/trl.md says what the others do: nothing, or an
    error. max_steps counts updates, not rollouts, and is rounded up to whole rollouts."""

    _: dataclasses.KW_ONLY

    num_generations: int | None = 8
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int = 1

    max_completion_length: int | None = 512
    temperature: float = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    generation_kwargs: dict | str | None = None
    """temperature, top_p, top_k, min_p, max_tokens, max_new_tokens and stop replace the fields above."""
    chat_template_kwargs: dict | str | None = None
    use_vllm: bool = False
    """qerl has its own engine. True: the fields vllm_importance_sampling_* say how the learner corrects."""
    max_tool_calling_iterations: int | None = None

    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "dapo"
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    importance_sampling_level: str = "token"
    scale_rewards: str = "group"
    """group, batch or none; True is group, False none."""
    reward_weights: list[float] | None = None
    mask_truncated_completions: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_cap: float | None = None
    num_generations_eval: int | None = None
    """Samples per prompt of `GRPOTrainer.evaluate`."""

    def __post_init__(self):
        TrainFields.__post_init__(self)
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"


@dataclasses.dataclass
class SFTConfig(TrainFields, SFTIgnoredFields, SFTRefusedFields):
    """The fields below and in TrainFields have an effect. docs/trl.md says what the others do: nothing, or an
    error."""

    _: dataclasses.KW_ONLY

    learning_rate: float = 2e-5
    max_length: int | None = 1024
    """Tokens of a row; what is beyond is cut off. None: as many as the model has positions."""
    packing: bool = False
    """True: a batch counts blocks of up to max_length tokens of whole rows, not rows. Nothing is
    padded in either case."""
    assistant_only_loss: bool = False
    """Chats: learn only what the assistant says, else every token."""
    completion_only_loss: bool | None = None
    """Rows of prompt and completion: False learns the prompt too."""
    dataset_text_field: str = "text"
    chat_template_path: str | None = None
    """A .jinja or .j2 file, or a folder or hub id whose tokenizer has the template."""
    eos_token: str | None = None
    """A token of the vocabulary; None: the tokenizer's own."""


@dataclasses.dataclass
class PreferenceFields(TrainFields):
    """The fields that DPOConfig and KTOConfig share and that have an effect."""

    _: dataclasses.KW_ONLY

    beta: float = 0.1
    max_length: int | None = 1024
    """Tokens of a prompt and its completion; what is beyond is cut off. None: as many as the model has
    positions."""
    disable_dropout: bool = True
    """True: no dropout of the adapter, whatever lora_dropout says. False with one is refused."""


@dataclasses.dataclass
class DPOConfig(PreferenceFields, DPOIgnoredFields, DPORefusedFields):
    """The fields below, in PreferenceFields and in TrainFields have an effect. docs/trl.md says what the
    others do: nothing, or an error."""

    _: dataclasses.KW_ONLY

    loss_type: list[str] = dataclasses.field(default_factory=lambda: ["sigmoid"])
    """Names of TRL's losses, or one name; several are added."""
    loss_weights: list[float] | None = None
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    train_sampling_strategy: str = "random"
    """random or sequential."""

    def __post_init__(self):
        TrainFields.__post_init__(self)
        self.loss_type = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type


@dataclasses.dataclass
class KTOConfig(PreferenceFields, KTOIgnoredFields, KTORefusedFields):
    """The fields below, in PreferenceFields and in TrainFields have an effect. docs/trl.md says what the
    others do: nothing, or an error."""

    _: dataclasses.KW_ONLY

    loss_type: str = "kto"
    """kto or apo_zero_unpaired."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    train_sampling_strategy: str = "sequential"
    """sequential, or random: one order for all epochs with kto."""


def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{name}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a JSON object, got {text}")
    return value
