"""Translate GRPOConfig to RunConfig, all but the model, the adapter and the task.

TRL         samples per generation  per_device_train_batch_size * steps_per_generation
            samples per update      per_device_train_batch_size * gradient_accumulation_steps
one step    one generation, then num_iterations passes, each of (per generation / per update) updates
"""

import dataclasses
import math
from typing import Any

from qerl.config import AlgoConfig, RunConfig, SampleConfig
from qerl.errors import require
from qerl.trl.config import GRPOConfig
from qerl.trl.translate import Batch, one_of, shared_config

_ADVANTAGES = {"group": "group", "batch": "batch", "none": "mean"}
_LOSSES = {name: name for name in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo")}
_IMPORTANCE = {
    "token_truncate": "truncated",
    "token_mask": "masked",
    "sequence_truncate": "truncated_sequence",
    "sequence_mask": "masked_sequence",
}
_SAMPLING = {"max_tokens": "max_tokens", "max_new_tokens": "max_tokens"} | {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop")
}
_NO_EFFECT = {"do_sample": True, "num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1, "n": 1}


def batch_of(args: GRPOConfig, num_rows: int | None) -> Batch:
    """num_rows: None if the rows are made as they are needed."""
    per_generation, per_update = _batch_sizes(args)
    num_prompts, rest = divmod(per_generation, args.num_generations or 8)
    require(
        rest == 0 and num_prompts > 0,
        f"per_device_train_batch_size * steps_per_generation must be a multiple of num_generations"
        f" ({args.num_generations}), got {per_generation}",
    )
    updates = per_generation // per_update
    steps_per_epoch = (num_rows or 0) // num_prompts
    num_steps = int(args.num_train_epochs * steps_per_epoch)
    if args.max_steps > 0:
        num_steps = math.ceil(args.max_steps / (updates * args.num_iterations))
    require(num_rows is not None or args.max_steps > 0, "max_steps must be set: train_dataset has no length")
    require(
        num_steps > 0, f"train_dataset has {num_rows} rows, too few for one step of {num_prompts} prompts"
    )
    return Batch(
        num_prompts=num_prompts,
        updates_per_step=updates,
        num_iterations=args.num_iterations,
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
    )


def samples_per_generation(args: GRPOConfig) -> int:
    """Return the samples that TRL makes at once, of which an update may take several times as many."""
    steps = args.steps_per_generation or args.gradient_accumulation_steps
    return args.generation_batch_size or args.per_device_train_batch_size * steps


def _batch_sizes(args: GRPOConfig) -> tuple[int, int]:
    """Return the samples per generation and per update. Several generations of one update are one here."""
    device, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps, size = args.steps_per_generation, args.generation_batch_size
    is_one = steps is None or size is None
    require(is_one, "generation_batch_size and steps_per_generation: set only one of them")
    steps = accumulated if steps is None else steps
    if size is not None:
        steps, rest = divmod(size, device)
        require(
            rest == 0,
            f"generation_batch_size must be a multiple of per_device_train_batch_size, got {size}",
        )
    if steps < accumulated and accumulated % steps == 0:
        require(
            args.num_iterations == 1,
            "num_iterations above 1 needs steps_per_generation >= gradient_accumulation_steps",
        )
        steps = accumulated
    require(
        steps % accumulated == 0,
        f"steps_per_generation must be a multiple of gradient_accumulation_steps ({accumulated}),"
        f" got {steps}",
    )
    return device * steps, device * accumulated


def run_config(args: GRPOConfig, base: RunConfig, batch: Batch, *, num_held_out: int) -> RunConfig:
    return dataclasses.replace(
        shared_config(args, base, batch, num_held_out=num_held_out),
        num_generations=args.num_generations or 8,
        sample=_sample(args),
        algo=_algo(args, base.algo),
    )


def _sample(args: GRPOConfig) -> SampleConfig:
    require(args.max_completion_length is not None, "max_completion_length must be a number, got None")
    assert args.max_completion_length is not None
    values: dict[str, Any] = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
    }
    assert not isinstance(args.generation_kwargs, str)
    for name, value in (args.generation_kwargs or {}).items():
        if name in _NO_EFFECT and value == _NO_EFFECT[name]:
            continue
        require(
            name in _SAMPLING,
            f"generation_kwargs[{name!r}] is not supported: remove it; there are {', '.join(_SAMPLING)}",
        )
        values[_SAMPLING[name]] = value
    stop = values.pop("stop", None) or ()
    top_p, top_k = values.pop("top_p"), values.pop("top_k")
    return SampleConfig(
        **values,
        top_p=None if top_p == 1.0 else top_p,
        top_k=None if top_k in (None, 0, -1) else top_k,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def _algo(args: GRPOConfig, base: AlgoConfig) -> AlgoConfig:
    loss = one_of("loss_type", args.loss_type, _LOSSES)
    level = one_of(
        "importance_sampling_level",
        args.importance_sampling_level,
        {"token": "token", "sequence": "sequence"},
    )
    if level == "sequence":
        require(loss == "grpo", f"importance_sampling_level sequence needs loss_type grpo (GSPO), got {loss}")
        loss = "gspo"
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    epsilon = args.epsilon
    if loss == "cispo":  # TRL bounds the ratio itself by epsilon_high, and not from below
        require(
            high > 1,
            f"epsilon_high bounds the ratio of loss_type cispo: set it above 1, such as 5.0, got {high}",
        )
        epsilon, high = 1.0, high - 1.0
    return dataclasses.replace(
        base,
        loss_type=loss,
        advantage=one_of("scale_rewards", args.scale_rewards, _ADVANTAGES),
        epsilon=epsilon,
        epsilon_high=high,
        beta=args.beta,
        kl_estimator="k3_unbiased" if args.use_bias_correction_kl else "k3",
        overlong="mask" if args.mask_truncated_completions else "keep",
        sapo=dataclasses.replace(
            base.sapo,
            temperature_positive=args.sapo_temperature_pos,
            temperature_negative=args.sapo_temperature_neg,
        ),
        **(_importance(args) if args.use_vllm else {}),
    )


def _importance(args: GRPOConfig) -> dict[str, Any]:
    """Return the correction of the sampler that TRL makes for vLLM."""
    if not args.vllm_importance_sampling_correction:
        return {"importance": "none"}
    kind = one_of("vllm_importance_sampling_mode", args.vllm_importance_sampling_mode, _IMPORTANCE)
    cap = args.vllm_importance_sampling_cap or args.vllm_importance_sampling_clip_max or 1e9
    low = args.vllm_importance_sampling_clip_min
    if low is None:
        return {"importance": kind, "importance_cap": cap}
    require(
        kind == "masked", "vllm_importance_sampling_clip_min needs vllm_importance_sampling_mode token_mask"
    )
    return {"importance": "icepop", "importance_cap": cap, "importance_floor": low}
