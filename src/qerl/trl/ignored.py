"""Fields of TRL 1.16's configs that change no result here. The trainers name in one line
those that are not at their default."""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(kw_only=True)
class IgnoredFields:
    # Precision, compilation and memory: model.dtype, the kernels and learn.gradient_checkpointing decide.
    fp16: bool = False
    tf32: bool | None = None
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    liger_kernel_config: dict[str, bool] | None = None
    use_cache: bool = False
    torch_empty_cache_steps: int | None = None
    auto_find_batch_size: bool = False
    activation_checkpointing: bool | None = None
    activation_checkpointing_kwargs: dict[str, Any] | str | None = None
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    full_determinism: bool = False
    # Several processes: torchrun alone says how many there are, and the batch is that of all of them.
    average_tokens_across_devices: bool = True
    accelerator_config: dict | str | None = None
    parallelism_config: dict | str | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
    ddp_backend: str | None = None
    ddp_timeout: int = 1800
    fsdp: str | None = None
    fsdp_config: dict[str, Any] | str | None = None
    deepspeed: dict | str | None = None
    local_rank: int = -1
    # Logging: metrics.jsonl has every step, samples.jsonl every sample.
    logging_first_step: bool = False
    log_on_each_node: bool = True
    logging_nan_inf_filter: bool = True
    include_num_input_tokens_seen: str = "no"
    log_level: str = "passive"
    log_level_replica: str = "warning"
    disable_tqdm: bool | None = None
    project: str = "huggingface"
    trackio_space_id: str | None = None
    trackio_bucket_id: str | None = None
    trackio_static_space_id: str | None | Literal[False] = None  # noqa: RUF036 (HfArgumentParser's order)
    skip_memory_metrics: bool = True
    debug: str = ""
    # Evaluation: one pass over all prompts, whatever the batch.
    per_device_eval_batch_size: int = 8
    prediction_loss_only: bool = False
    eval_delay: float = 0
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False
    eval_accumulation_steps: int | None = None
    include_for_metrics: list[str] = dataclasses.field(default_factory=list)
    batch_eval_metrics: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    # Checkpoints: always whole, and resumed where they stopped.
    save_only_model: bool = False
    save_on_each_node: bool = False
    enable_jit_checkpoint: bool = False
    hub_always_push: bool = False
    restore_callback_states_from_checkpoint: bool = False
    ignore_data_skip: bool = False
    resume_from_checkpoint: str | None = None
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False
    # Data: rows are read in this process; nothing is padded.
    data_seed: int | None = None
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    label_names: list[str] | None = None
    length_column_name: str = "length"
    pad_to_multiple_of: int | str | None = "auto"
    # The model: no code of a model is run.
    trust_remote_code: bool = False


@dataclasses.dataclass(kw_only=True)
class GRPOIgnoredFields(IgnoredFields):
    ds3_gather_for_generation: bool = True
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None
    # Data: functions get the columns that they name; TRL's sampler draws the groups whatever these say.
    dataloader_drop_last: bool = False
    remove_unused_columns: bool | None = False
    label_smoothing_factor: float = 0.0
    train_sampling_strategy: str = "random"
    # The model: the base has no dropout, logits are accumulated in fp32.
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False
    # Sampling: qerl has its own engine.
    cache_implementation: str | None = None
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict | str | None = None
    use_transformers_paged: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    # Settings of what `GRPORefusedFields` refuses.
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2


@dataclasses.dataclass(kw_only=True)
class SFTIgnoredFields(IgnoredFields):
    # Rows are packed without padding, read in this process, and drawn in a random order in any case.
    dataset_num_proc: int | None = None
    padding_free: bool = False
    eval_packing: bool | None = None
    pad_token: str | None = None
    remove_unused_columns: bool | None = True
    shuffle_dataset: bool = False
    activation_offloading: bool = False


@dataclasses.dataclass(kw_only=True)
class KTOIgnoredFields(IgnoredFields):
    # Rows are packed without padding; the reference's logprobs are always computed once, before training.
    dataset_num_proc: int | None = None
    remove_unused_columns: bool | None = True
    activation_offloading: bool = False
    precompute_ref_log_probs: bool = False
    precompute_ref_batch_size: int | None = None
    # Settings of sync_ref_model, which is refused.
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512


@dataclasses.dataclass(kw_only=True)
class DPOIgnoredFields(KTOIgnoredFields):
    padding_free: bool = False
    pad_token: str | None = None


def ignored(args: IgnoredFields, kind: type[IgnoredFields]) -> list[str]:
    """Return the names of the fields of `kind`, one of the classes above, that are not at their default."""
    defaults = kind()
    names = (field.name for field in dataclasses.fields(kind))
    return [name for name in names if getattr(args, name) != getattr(defaults, name)]
