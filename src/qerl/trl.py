"""GRPOTrainer and GRPOConfig with TRL's interface, over `qerl.train`: change the import of a TRL script.

    from qerl.trl import GRPOConfig, GRPOTrainer

GRPOConfig has the fields of TRL's GRPOConfig that apply here, with TRL's defaults; any other field raises an
error. Four differences from TRL: without a peft_config, the LoRA adapter of `base` is trained (rank 32) and
not the weights; the learning rate schedule is cosine or constant, never linear; gradient_checkpointing is off
(`base.learn.gradient_checkpointing` still applies); `report_to` defaults to tensorboard.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from qerl.config import (
    AdapterConfig,
    CheckpointConfig,
    EvalConfig,
    LearnConfig,
    NoiseConfig,
    RunConfig,
    SampleConfig,
)
from qerl.config.options import ExportOptions
from qerl.errors import UserError, require
from qerl.export import export
from qerl.tasks.scoring import name_of
from qerl.tracking.atomic_file import write_atomic
from qerl.training.session import train

_ADVANTAGES = {True: "group", "group": "group", False: "mean", "none": "mean"}
_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
}
_LOSSES = {name: name for name in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo")}
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
_LOGGERS = {"none": (), "all": ("tensorboard", "wandb", "mlflow", "trackio")}
_LORA_DEFAULTS = {
    "lora_dropout": 0.0,
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "exclude_modules": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}


@dataclasses.dataclass(frozen=True, slots=True)
class GRPOConfig:
    """Fields with TRL's names, defaults and meaning."""

    output_dir: str = "trainer_output"
    _: dataclasses.KW_ONLY
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "cosine"
    warmup_ratio: float = 0.0
    warmup_steps: float = 0
    """A value below 1 is a share of all steps, as in transformers 5."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    num_train_epochs: float = 3.0
    max_steps: int = -1
    num_generations: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: Literal["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"] = "dapo"
    scale_rewards: bool | str = True
    mask_truncated_completions: bool = False
    reward_weights: Sequence[float] | None = None
    bf16: bool | None = None
    save_steps: int = 500
    save_total_limit: int | None = None
    report_to: str | Sequence[str] = "tensorboard"
    seed: int = 42
    logging_steps: int = 1
    """Ignored: metrics.jsonl has every step."""
    log_completions: bool = False
    """Ignored: samples.jsonl has every sample."""
    remove_unused_columns: bool = False
    """Ignored: reward functions get the columns that they name."""
    use_vllm: bool = False
    """Ignored: qerl has its own engine."""


class GRPOTrainer:
    def __init__(
        self,
        model: str,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        args: GRPOConfig | None = None,
        train_dataset: Iterable[dict[str, Any]] = (),
        *,
        peft_config: Any = None,
        base: RunConfig | None = None,
    ):
        """`train_dataset` is a datasets.Dataset or a list of rows with a column `prompt`: messages, or a text
        that is given to the model unchanged. `base` has the fields that TRL does not, such as model.format,
        noise and engine; the default has NVFP4 weights and no noise."""
        require(isinstance(model, str), f"model must be a folder or a hub id, got a {type(model).__name__}")
        self.args = args or GRPOConfig()
        functions: Any = reward_funcs
        self.reward_funcs = list(functions) if isinstance(functions, list | tuple) else [functions]
        for function in self.reward_funcs:
            require(
                callable(function),
                f"reward_funcs must be functions, got {function!r}; reward models are not supported",
            )
        base = base or RunConfig(noise=NoiseConfig(schedule="none"))
        rows = [dict(row) for row in train_dataset]
        require(len(rows) > 0, "train_dataset has no rows")
        config = _run_config(self.args, base, num_rows=len(rows))
        self.config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=model),
            adapter=_adapter(peft_config, base.adapter),
            task=dataclasses.replace(
                base.task,
                name=str(_write_rows(rows, Path(self.args.output_dir))),
                template="{prompt}",
                chat="messages",
                num_held_out=0,
                rewards=tuple(map(name_of, self.reward_funcs)),
                reward_weights=tuple(self.args.reward_weights or ()),
            ),
        )

    def train(self) -> dict[str, Any]:
        """Train, or resume the run in output_dir; return the result as `qerl.train` does."""
        return train(self.config, rewards=self.reward_funcs)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the adapter in PEFT's format, by default to the folder `adapter` of the run."""
        run = Path(self.args.output_dir)
        export(self.config, ExportOptions(run=run, out=Path(output_dir or run / "adapter"), form="peft"))


def _run_config(args: GRPOConfig, base: RunConfig, *, num_rows: int) -> RunConfig:
    """Translate all but the model, the adapter and the task."""
    num_prompts, num_steps = _batch_and_steps(args, num_rows)
    report_to = [args.report_to] if isinstance(args.report_to, str) else args.report_to
    dtype = base.model.dtype if args.bf16 is None else ("bf16" if args.bf16 else "fp32")
    keep = base.checkpoint.keep if args.save_total_limit is None else args.save_total_limit
    return dataclasses.replace(
        base,
        out=args.output_dir,
        seed=args.seed,
        num_steps=num_steps,
        num_prompts=num_prompts,
        num_generations=args.num_generations,
        loggers=tuple(name for given in report_to for name in _LOGGERS.get(given, (given,))),
        model=dataclasses.replace(base.model, dtype=dtype),
        sample=SampleConfig(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=None if args.top_p == 1.0 else args.top_p,
            top_k=args.top_k or None,
            min_p=args.min_p,
        ),
        algo=dataclasses.replace(
            base.algo,
            loss_type=_one_of(args, "loss_type", _LOSSES),
            advantage=_one_of(args, "scale_rewards", _ADVANTAGES),
            epsilon=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            beta=args.beta,
            overlong="mask" if args.mask_truncated_completions else "keep",
        ),
        learn=_learn_config(args, base.learn, num_steps),
        evaluate=EvalConfig(num_prompts=0),
        checkpoint=CheckpointConfig(every=args.save_steps, keep=keep),
    )


def _batch_and_steps(args: GRPOConfig, num_rows: int) -> tuple[int, int]:
    """Return the prompts per step and the number of steps."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    num_prompts, rest = divmod(batch, args.num_generations)
    require(
        rest == 0 and num_prompts > 0,
        "per_device_train_batch_size * gradient_accumulation_steps must be a multiple of num_generations"
        f" ({args.num_generations}), got {batch}",
    )
    num_epoch_steps = int(args.num_train_epochs * (num_rows // num_prompts))
    num_steps = args.max_steps if args.max_steps > 0 else num_epoch_steps
    require(
        num_steps > 0, f"train_dataset has {num_rows} rows, too few for one step of {num_prompts} prompts"
    )
    return num_prompts, num_steps


def _learn_config(args: GRPOConfig, base: LearnConfig, num_steps: int) -> LearnConfig:
    warmup_ratio = args.warmup_steps or args.warmup_ratio
    return dataclasses.replace(
        base,
        learning_rate=args.learning_rate,
        lr_scheduler_type=_one_of(args, "lr_scheduler_type", _SCHEDULES),
        warmup_ratio=args.warmup_steps / num_steps if args.warmup_steps >= 1 else warmup_ratio,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        optim=_one_of(args, "optim", _OPTIMIZERS),
        gradient_checkpointing="layer" if args.gradient_checkpointing else base.gradient_checkpointing,
    )


def _one_of(args: GRPOConfig, field: str, known: dict[Any, Any]) -> Any:
    value = getattr(args, field)
    require(value in known, f"{field} must be one of {', '.join(map(str, known))}, got {value}")
    return known[value]


def _adapter(peft_config: Any, base: AdapterConfig) -> AdapterConfig:
    """Translate a peft.LoraConfig without options that are not supported."""
    if peft_config is None:
        return base
    for name, default in _LORA_DEFAULTS.items():
        value = getattr(peft_config, name, default) or default
        require(value == default, f"peft_config.{name} must be {default!r}, got {value!r}")
    targets: Any = peft_config.target_modules
    if targets is None or targets == "all-linear":
        targets = AdapterConfig().target_modules
    require(
        not isinstance(targets, str),
        f'peft_config.target_modules must be "all-linear" or a list of names, got the pattern {targets!r}',
    )
    return dataclasses.replace(
        base, rank=peft_config.r, alpha=float(peft_config.lora_alpha), target_modules=tuple(sorted(targets))
    )


def _write_rows(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Write the rows to a file named by their hash, so that a run is not resumed with other rows."""
    try:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    except TypeError as error:
        raise UserError(f"train_dataset: a column cannot be stored as JSON: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"train-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
    write_atomic(path, content)
    return path
