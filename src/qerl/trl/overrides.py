"""Methods of TRL's trainers that a subclass may override: each is honoured here or refused by name."""

import inspect
import re
from typing import Any

from qerl.errors import UserError, require
from qerl.trl.translate import plain

NAMES = frozenset(
    re.findall(
        r"\w+",
        """
_activate_neftune _add_sm_patterns_to_gitignore _align_special_tokens _build_accelerator_args
_calculate_rewards _clip_grad_norm _compute_kl_logps _compute_loss _create_model_from_path
_deactivate_neftune _defer_fsdp_gradient_reduction _determine_best_metric _enable_gradient_checkpointing
_evaluate _finalize_training _finish_current_push _fix_param_name_to_vllm _fsdp_qlora_plugin_updates
_gather_and_numpify _generate _generate_and_score_completions _generate_single_turn
_get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_grad_norm _get_last_hidden_state
_get_learning_rate _get_num_items_in_batch _get_output_dir _get_per_token_logps
_get_per_token_logps_and_entropies _get_tool_suffix_ids _get_train_sampler _has_mixed_mesh_grads
_hp_search_setup _init_training_state _inner_training_loop _is_attention_mask_causal
_issue_warnings_after_load _load_best_model _load_callback_state _load_from_checkpoint
_load_optimizer_and_scheduler _load_rng_state _load_scaler _log_completion_extra _log_metric
_maybe_log_save_evaluate _mixed_mesh_grad_norm _move_model_to_device _move_model_to_vllm _nested_gather
_prepare_context_parallel_inputs _prepare_dataset _prepare_for_training _prepare_input _prepare_inputs
_precompute_ref_logps _prepare_model_for_kbit_training _prepare_peft_model _push_from_checkpoint
_reject_skip_prepare_without_labels _remove_unused_columns _report_to_hp_search _rotate_checkpoints
_run_epoch _save _save_checkpoint _save_optimizer_and_scheduler _save_rng_state _save_scaler _save_tpu
_send_telemetry _set_signature_columns_if_needed _sorted_checkpoints _sync_fsdp1_params_to_vllm
_sync_fsdp2_params_to_vllm _sync_fsdp_params_to_vllm _sync_replicated_trainable_parameters _tokenize_prompts
_tool_call_loop _track_num_input_tokens _tune_save_checkpoint _update_auto_batch_size _validate_args
_wrap_model add_callback autocast_smart_context_manager call_model_init compare_trainer_and_checkpoint_args
compute_liger_loss compute_loss compute_loss_context_manager compute_ref_log_probs
create_accelerator_and_postprocess create_model_card create_optimizer create_optimizer_and_scheduler
create_scheduler end evaluate evaluation_loop floating_point_ops get_batch_samples get_cp_size
get_decay_parameter_names get_eval_dataloader get_gamma_weights get_high_entropy_mask get_learning_rates
get_num_trainable_parameters get_off_policy_mask get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size
get_test_dataloader get_total_train_batch_size get_tp_size get_train_dataloader hyperparameter_search
init_hf_repo is_local_process_zero is_world_process_zero log log_metrics metrics_format num_examples
num_tokens pop_callback predict prediction_loop prediction_step propagate_args_to_deepspeed push_to_hub
remove_callback save_metrics save_model save_state set_initial_training_values store_flos tokenizer
torch_jit_model_eval train training_step
""",
    )
)
"""Methods and properties of GRPOTrainer, SFTTrainer, DPOTrainer and KTOTrainer of TRL 0.19 to 1.16 and of
transformers' Trainer 4.56 to 5.24, of which they are subclasses."""
HONOURED = frozenset(
    re.findall(
        r"\w+",
        """
train evaluate log log_metrics save_metrics save_state save_model push_to_hub add_callback pop_callback
remove_callback is_world_process_zero is_local_process_zero end
""",
    )
)
"""Those that the run or the script calls."""
_ADVICE = {
    "loss": "set loss_type and its fields; a loss of your own is a function in qerl (docs/extend.md)",
    "generat": "write tools or an environment_factory",
    "tool": "write tools or an environment_factory",
    "reward": "write reward_funcs",
    "optimizer": "set optim, learning_rate and weight_decay",
    "scheduler": "set lr_scheduler_type and warmup_steps",
    "dataloader": "prepare the rows of train_dataset",
    "sampler": "prepare the rows of train_dataset",
    "dataset": "prepare the rows of train_dataset",
    "log": "override log, or write a callback with on_log",
    "save": "write a callback with on_save",
}
_IN_A_RUN = {
    "evaluate": ("eval_strategy", "a callback with on_evaluate gets the figures"),
    "save_model": ("save_strategy", "a callback with on_save is called at each checkpoint"),
}
"""Methods that TRL also calls in the middle of a run, as this field says."""


def check_overrides(trainer: Any) -> None:
    """Raise UserError for the first method of the trainer's class, or of the object, that is not this
    package's and that a run would not call, or that replaces a part of this package."""
    kind = type(trainer)
    for name in sorted({*dir(kind), *vars(trainer)}):
        is_own = name in vars(trainer)
        method = vars(trainer)[name] if is_own else inspect.getattr_static(kind, name)
        if name.startswith("__") or (is_own and not callable(method)) or _is_ours(method):
            continue
        where = f"{kind.__name__}.{name}"
        if name in NAMES - HONOURED:
            advice = next((text for part, text in _ADVICE.items() if part in name), "remove it")
            raise UserError(f"{where} is not supported: the run would not call it; {advice}")
        replaces = any(_is_ours(vars(base).get(name)) for base in kind.__mro__)
        require(name in HONOURED or not replaces, f"{where} replaces a method of qerl.trl: rename it")
        if name in _IN_A_RUN:
            field, advice = _IN_A_RUN[name]
            require(
                plain(getattr(trainer.args, field)) == "no",
                f"{where} is not supported with {field}: the run would not call it; {advice}, or set {field}"
                " to no if only the script calls it",
            )


def _is_ours(method: Any) -> bool:
    function = getattr(method, "fget", None) or getattr(method, "__func__", method)
    return str(getattr(function, "__module__", "")).startswith("qerl.trl.")
