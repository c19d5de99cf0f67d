"""Fine-tune a model on chats, completions or texts, with or without RL after it."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from qerl.cli.arguments import announce_run, expand, parse_options, wants_help
from qerl.cli.help import Help
from qerl.cli.result import print_result, take_flag
from qerl.cli.train import COMMON, check_early, take_init_adapter
from qerl.config import (
    AdapterConfig,
    AlgoConfig,
    CheckpointConfig,
    EvalConfig,
    LearnConfig,
    ModelConfig,
    NoiseConfig,
    RunConfig,
    SampleConfig,
    SftConfig,
)
from qerl.config.check import check_numbers, check_positive
from qerl.errors import UserError, require

DESCRIPTION = f"""{__doc__}

examples:
  qerl sft --data chats.jsonl --model Qwen/Qwen2.5-1.5B-Instruct --out runs/sft
  qerl train --init-adapter runs/sft --task ...     # continue with rewards"""
_SHORT = {"--model": "--model.path"}
HELP = Help(
    DESCRIPTION,
    {
        "--data ROWS": "file of rows, or a hub id",
        **{name: COMMON[name] for name in ("--model MODEL", "--init-adapter FOLDER", "--out FOLDER")},
        "--num-train-epochs": "passes over the rows",
        "--max-steps": "updates at most; None: by the epochs",
        "--batch-size": "rows per update",
        "--max-length": "longest row, in tokens",
        "--packing": "rows side by side, without padding",
        "--assistant-only-loss": "learn only what the assistant says",
        "--learn.learning-rate": "",
        "--learn.warmup-ratio": "share of the updates",
        **{name: COMMON[name] for name in ("--adapter.rank", "--model.format FORMAT")},
        "--evaluate.num-prompts": "held-out rows; 0: none",
        **{name: COMMON[name] for name in ("--evaluate.every", "--checkpoint.every", "--seed", "--json")},
    },
    _SHORT,
)
_LEARN = LearnConfig(learning_rate=2e-4, warmup_ratio=0.03)
_CHECKPOINT = CheckpointConfig(every=50)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SftOptions:
    sft: Annotated[SftConfig, tyro.conf.arg(name="")] = SftConfig()

    out: str = "runs/sft"
    """The run's folder; the same command resumes what it finds there."""

    run_name: str | None = None
    """Name of the run in wandb, mlflow and trackio; None: the folder's name."""

    seed: int = 0
    """Seed of the adapter and of the rows' order."""

    batch_size: int = 16
    """Rows per step, which is one update of the adapter."""

    max_steps: int | None = None
    """Number of steps; None: as many as the epochs take."""

    eval_max_tokens: int = 128
    """Maximum tokens of such an answer to an evaluation row (num_eval_samples)."""

    accept_changes: bool = False
    """Resume although the rows differ from those that the run began with."""

    strict: bool = False
    """Raise an error, not a notice, where rows are not learned as they are given."""

    rank_timeout_s: float = 600.0
    """With torchrun: a rank that is frozen for this long is lost; the others save the last step and end."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Loggers of metrics besides the run's own files."""

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    learn: LearnConfig = _LEARN
    evaluate: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = _CHECKPOINT

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "batch_size", "max_steps", "eval_max_tokens")
        learn = self.learn
        require(
            learn.updates_per_step == learn.num_iterations == 1,
            "a step over rows is one update: leave learn.updates_per_step and learn.num_iterations at 1",
        )


_Options = TypeVar("_Options", bound=SftOptions)


def run(arguments: list[str]) -> None:
    options, as_json = parse_rows_options(SftOptions, arguments, "sft", HELP)
    announce_run(f"sft {options.sft.data}: {options.model.path} in {options.model.format}, {options.out}")
    config = run_config(options)
    check_early(config)
    from qerl.training.sft import fine_tune  # imports torch and transformers, which takes seconds

    print_result(fine_tune(config, max_steps=options.max_steps), as_json=as_json)


def parse_rows_options(
    kind: type[_Options], arguments: list[str], command: str, help: Help
) -> tuple[_Options, bool]:
    """Return the options of a command over rows, and True if its result is to be JSON. Raise UserError if
    they name no rows."""
    if wants_help(arguments):
        parse_options(kind, arguments, command, help=help)
    if arguments and Path(arguments[0]).suffix and not arguments[0].startswith("-"):
        raise UserError(f"{command} takes its rows by --data: qerl {command} --data {arguments[0]}")
    as_json, arguments = take_flag(arguments, "--json")
    adapter, arguments = take_init_adapter(arguments)
    default = kind() if adapter is None else kind(adapter=adapter)
    options = parse_options(kind, expand(arguments, help.short), command, default, help)
    if not options.sft.data:
        raise UserError(f"{command} needs --data: a .jsonl, .json, .parquet or .csv file, or a hub id")
    return options, as_json


def run_config(options: SftOptions) -> RunConfig:
    """Return the run of these options; num_steps follows from the rows."""
    other = {"batch_size", "max_steps", "eval_max_tokens"}
    names = {field.name for field in dataclasses.fields(options)} - other
    return RunConfig(
        **{name: getattr(options, name) for name in names},
        num_prompts=options.batch_size,
        sample=SampleConfig(max_tokens=options.eval_max_tokens),
        noise=NoiseConfig(schedule="none"),
        algo=AlgoConfig(loss_type="nll", importance="none"),
    )
