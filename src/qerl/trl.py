"""TRL's GRPOTrainer and GRPOConfig over `qerl.train`: a script for TRL runs by changing its import.

    from qerl.trl import GRPOConfig, GRPOTrainer

GRPOConfig has those of TRL's fields that mean something here, with TRL's defaults; any other is refused by
its name. Four things are not TRL's: without a peft_config the adapter of `base` learns (rank 32), not the
weights; the rate falls as a cosine unless it is constant, not linearly; `gradient_checkpointing` is off and
leaves that to learn.gradient_checkpointing of `base`; `report_to` is tensorboard.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from qerl.config import AdapterConfig, CheckpointConfig, EvalConfig, NoiseConfig, RunConfig, SampleConfig
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
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}
_LOGGERS = {"none": (), "all": ("tensorboard", "wandb", "mlflow", "trackio")}
_PLAIN_LORA = {
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
    """TRL's names, defaults and meanings."""

    output_dir: str = "trainer_output"
    _: dataclasses.KW_ONLY
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "cosine"
    warmup_ratio: float = 0.0
    warmup_steps: float = 0
    """Below 1 a share of all steps, as in transformers 5."""
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
    """Read by nobody: every step is in metrics.jsonl."""
    log_completions: bool = False
    """Read by nobody: every sample is in samples.jsonl."""
    remove_unused_columns: bool = False
    """Read by nobody: rewards get the columns that they ask for."""
    use_vllm: bool = False
    """Read by nobody: the engine is qerl's own."""


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
        """`train_dataset`: a datasets.Dataset or a list of rows, with a column `prompt`: a text, given to the
        model as it is, or messages. `base`: what TRL has no word for, such as model.format, noise and engine;
        without it the weights are NVFP4 and there is no noise."""
        require(isinstance(model, str), f"model must be a folder or a hub id, got a {type(model).__name__}")
        self.args = args or GRPOConfig()
        functions: Any = reward_funcs
        self.reward_funcs = list(functions) if isinstance(functions, list | tuple) else [functions]
        for function in self.reward_funcs:
            require(callable(function), f"reward_funcs must be functions, got {function!r}; no reward models")
        base = base or RunConfig(noise=NoiseConfig(schedule="none"))
        rows = [dict(row) for row in train_dataset]
        require(len(rows) > 0, "train_dataset holds no rows")
        config = _run_config(self.args, base, num_rows=len(rows))
        self.config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=model),
            adapter=_adapter(peft_config, base.adapter),
            task=dataclasses.replace(
                base.task,
                name=str(_written(rows, Path(self.args.output_dir))),
                template="{prompt}",
                chat="messages",
                num_held_out=0,
                rewards=tuple(map(name_of, self.reward_funcs)),
                reward_weights=tuple(self.args.reward_weights or ()),
            ),
        )
        """What is run."""

    def train(self) -> dict[str, Any]:
        """Runs, or goes on with what output_dir holds, as `qerl.train`."""
        return train(self.config, rewards=self.reward_funcs)

    def save_model(self, output_dir: str | None = None) -> None:
        """The adapter, as PEFT loads it; into output_dir/adapter of the config unless a folder is named."""
        run = Path(self.args.output_dir)
        export(self.config, ExportOptions(run=run, out=Path(output_dir or run / "adapter"), form="peft"))


def _run_config(args: GRPOConfig, base: RunConfig, *, num_rows: int) -> RunConfig:
    """All but the model, the adapter and the task."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    num_prompts, rest = divmod(batch, args.num_generations)
    require(
        rest == 0 and num_prompts > 0,
        "per_device_train_batch_size * gradient_accumulation_steps must be a multiple of num_generations"
        f" ({args.num_generations}), got {batch}",
    )
    num_steps = (
        args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * (num_rows // num_prompts))
    )
    require(num_steps > 0, f"train_dataset has {num_rows} rows, which makes no step of {num_prompts} prompts")
    warmup = (
        args.warmup_steps / num_steps if args.warmup_steps >= 1 else args.warmup_steps or args.warmup_ratio
    )
    keep = base.checkpoint.keep if args.save_total_limit is None else args.save_total_limit
    report_to = [args.report_to] if isinstance(args.report_to, str) else args.report_to
    compute = base.model.dtype if args.bf16 is None else ("bf16" if args.bf16 else "fp32")
    return dataclasses.replace(
        base,
        out=args.output_dir,
        seed=args.seed,
        num_steps=num_steps,
        num_prompts=num_prompts,
        num_generations=args.num_generations,
        loggers=tuple(name for given in report_to for name in _LOGGERS.get(given, (given,))),
        model=dataclasses.replace(base.model, dtype=compute),
        sample=SampleConfig(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=None if args.top_p == 1.0 else args.top_p,
            top_k=args.top_k or None,
            min_p=args.min_p,
        ),
        algo=dataclasses.replace(
            base.algo,
            loss_type=_one_of(
                args, "loss_type", {n: n for n in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo")}
            ),
            advantage=_one_of(args, "scale_rewards", _ADVANTAGES),
            epsilon=args.epsilon,
            epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
            beta=args.beta,
            overlong="mask" if args.mask_truncated_completions else "keep",
        ),
        learn=dataclasses.replace(
            base.learn,
            learning_rate=args.learning_rate,
            lr_scheduler_type=_one_of(args, "lr_scheduler_type", _SCHEDULES),
            warmup_ratio=warmup,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
            max_grad_norm=args.max_grad_norm,
            optim=_one_of(args, "optim", _OPTIMIZERS),
            gradient_checkpointing="layer"
            if args.gradient_checkpointing
            else base.learn.gradient_checkpointing,
        ),
        evaluate=EvalConfig(num_prompts=0),
        checkpoint=CheckpointConfig(every=args.save_steps, keep=keep),
    )


def _one_of(args: GRPOConfig, field: str, known: dict[Any, Any]) -> Any:
    value = getattr(args, field)
    require(value in known, f"{field} must be one of {', '.join(map(str, known))}, got {value}")
    return known[value]


def _adapter(peft_config: Any, base: AdapterConfig) -> AdapterConfig:
    """What a peft.LoraConfig says, where it is a plain LoRA."""
    if peft_config is None:
        return base
    for name, plain in _PLAIN_LORA.items():
        value = getattr(peft_config, name, plain) or plain
        require(value == plain, f"peft_config.{name} must be {plain!r}, got {value!r}")
    targets: Any = peft_config.target_modules
    if targets is None or targets == "all-linear":
        targets = AdapterConfig().target_modules
    require(
        not isinstance(targets, str),
        f"peft_config.target_modules must be all-linear or names of linears, got the pattern {targets!r}",
    )
    return dataclasses.replace(
        base, rank=peft_config.r, alpha=float(peft_config.lora_alpha), targets=tuple(sorted(targets))
    )


def _written(rows: list[dict[str, Any]], folder: Path) -> Path:
    """A file of the rows, named by their hash: a run is not gone on with by other rows."""
    try:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    except TypeError as error:
        raise UserError(f"train_dataset: its columns must be what JSON can hold: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"train-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
    write_atomic(path, content)
    return path
