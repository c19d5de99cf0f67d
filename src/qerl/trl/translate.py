"""Translate the fields that GRPOConfig and SFTConfig share to RunConfig."""

import dataclasses
from collections.abc import Sized
from typing import Any

from qerl.config import CheckpointConfig, LearnConfig, ModelConfig, RunConfig
from qerl.errors import require
from qerl.trl.config import TrainFields

_OPTIMIZERS = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_bnb", "paged_adamw", "paged_adamw_32bit"), "adamw"
    ),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
_SCHEDULES = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {"num_cycles": 0.5}),
    "cosine_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}),
    "polynomial": ("linear", {"power": 1.0, "lr_end": 1e-7}),
    "constant_with_warmup": ("constant", {}),
    "constant": ("constant", {}),
}
"""Schedules of transformers with their keyword arguments; power and num_cycles must be at their default."""
_LOGGERS = {name: (name,) for name in ("tensorboard", "wandb", "mlflow", "trackio")}
_LOGGERS |= {"none": (), "all": tuple(_LOGGERS)}
_INTERVALS = {"no": "no", "steps": "steps", "epoch": "epoch"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Batch(num_prompts=8, updates_per_step=4, num_iterations=1, num_steps=100, steps_per_epoch=50)"""

    num_prompts: int
    """Prompts of a step; of SFT, its rows or blocks."""
    updates_per_step: int
    num_iterations: int
    num_steps: int
    steps_per_epoch: int

    @property
    def updates(self) -> int:
        """Updates per step: TRL's global_step grows by this."""
        return self.updates_per_step * self.num_iterations

    def every(self, strategy: str, interval: float | None) -> int | None:
        """Return the number of steps between two events of a strategy no, steps or epoch."""
        if strategy == "epoch":
            return max(1, self.steps_per_epoch)
        if strategy == "no" or not interval:
            return None
        updates = interval * self.num_steps * self.updates if interval < 1 else interval
        return max(1, round(updates / self.updates))


def shared_config(args: TrainFields, base: RunConfig, batch: Batch, *, num_held_out: int) -> RunConfig:
    """Return base with what the fields of both configs say."""
    names = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    loggers = [logger for name in names for logger in one_of("report_to", name, _LOGGERS)]
    evaluates = num_held_out > 0
    return dataclasses.replace(
        base,
        out=str(args.output_dir),
        run_name=args.run_name,
        seed=args.seed,
        num_steps=batch.num_steps,
        num_prompts=batch.num_prompts,
        loggers=tuple(dict.fromkeys(loggers)),
        model=_model(args, base.model),
        learn=_learn(args, base.learn, batch),
        evaluate=dataclasses.replace(
            base.evaluate,
            num_prompts=num_held_out if evaluates else 0,
            every=_eval_every(args, batch) if evaluates else None,
        ),
        checkpoint=_checkpoint(args, base.checkpoint, batch),
    )


def _eval_every(args: TrainFields, batch: Batch) -> int | None:
    strategy = one_of("eval_strategy", args.eval_strategy, _INTERVALS)
    return batch.every(strategy, args.logging_steps if args.eval_steps is None else args.eval_steps)


def _checkpoint(args: TrainFields, base: CheckpointConfig, batch: Batch) -> CheckpointConfig:
    every = batch.every(one_of("save_strategy", args.save_strategy, _INTERVALS), args.save_steps)
    return CheckpointConfig(every=every or batch.num_steps, keep=args.save_total_limit or base.keep)


def _model(args: TrainFields, base: ModelConfig) -> ModelConfig:
    dtype = base.dtype if args.bf16 is None or args.fp16 else ("bf16" if args.bf16 else "fp32")
    return dataclasses.replace(base, dtype=dtype, device="cpu" if args.use_cpu else base.device)


def _learn(args: TrainFields, base: LearnConfig, batch: Batch) -> LearnConfig:
    num_updates, warmup = batch.num_steps * batch.updates, args.warmup_steps or args.warmup_ratio
    schedule, min_lr_ratio = _schedule(args)
    ratio = min(1.0, warmup / num_updates if warmup >= 1 else warmup)
    return dataclasses.replace(
        base,
        learning_rate=args.learning_rate,
        lr_scheduler_type=schedule,
        min_lr_ratio=min_lr_ratio,
        warmup_ratio=0.0 if plain(args.lr_scheduler_type) == "constant" else ratio,
        betas=(args.adam_beta1, args.adam_beta2),
        adam_epsilon=args.adam_epsilon,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm or 1e9,
        updates_per_step=batch.updates_per_step,
        num_iterations=batch.num_iterations,
        optim=one_of("optim", args.optim, _OPTIMIZERS),
        gradient_checkpointing=base.gradient_checkpointing if args.gradient_checkpointing else "none",
    )


def _schedule(args: TrainFields) -> tuple[Any, float]:
    """Return the schedule and its minimum as a share of the rate."""
    schedule, options = one_of("lr_scheduler_type", args.lr_scheduler_type, _SCHEDULES)
    assert not isinstance(args.lr_scheduler_kwargs, str)
    for name, value in (args.lr_scheduler_kwargs or {}).items():
        fixed = options.get(name) if name in ("num_cycles", "power") else None
        known = name in options and fixed in (None, value)
        must_be = "" if fixed is None else f": {plain(args.lr_scheduler_type)} has {fixed}"
        require(known, f"lr_scheduler_kwargs[{name!r}] = {value!r} is not supported{must_be}; remove it")
    values = options | (args.lr_scheduler_kwargs or {})
    rate, end = values.get("min_lr_rate"), values.get("min_lr", values.get("lr_end"))
    if "min_lr" in options:
        require(
            (rate is None) != (end is None),
            "lr_scheduler_kwargs: cosine_with_min_lr needs either min_lr or min_lr_rate",
        )
    ratio = rate if rate is not None else (end or 0.0) / args.learning_rate
    require(0 <= ratio <= 1, "lr_scheduler_kwargs: the lowest rate must be between 0 and learning_rate")
    return schedule, ratio


def plain(value: Any) -> Any:
    """Return a member of transformers' string enums as its string."""
    return getattr(value, "value", value)


def one_of(field: str, value: Any, known: dict[str, Any]) -> Any:
    value = plain(value)
    require(value in known, f"{field} must be one of {', '.join(known)}, got {value}")
    return known[value]


def length(rows: Any) -> int | None:
    """Return the number of rows; None for a stream."""
    return len(rows) if isinstance(rows, Sized) else None
