"""Learn from preferences: chosen and rejected completions (DPO), or rated ones (KTO)."""

import dataclasses
from typing import Annotated

import tyro

from qerl.cli.arguments import announce_run
from qerl.cli.help import Help
from qerl.cli.result import print_result
from qerl.cli.sft import SftOptions, parse_rows_options, run_config
from qerl.cli.train import COMMON, check_early
from qerl.config import DpoConfig, LearnConfig, SftConfig
from qerl.errors import require

DESCRIPTION = f"""{__doc__}

examples:
  qerl dpo --data pairs.jsonl --model Qwen/Qwen2.5-1.5B-Instruct --out runs/dpo
  qerl dpo --data ratings.jsonl --loss kto --init-adapter runs/sft"""
_SHORT = {"--model": "--model.path", "--loss": "--loss-type"}
HELP = Help(
    DESCRIPTION,
    {
        "--data ROWS": "file of rows, or a hub id",
        "--loss LOSS ...": "sigmoid (DPO), ipo, kto and others",
        "--beta": "weight of the reference",
        **{name: COMMON[name] for name in ("--model MODEL", "--init-adapter FOLDER", "--out FOLDER")},
        "--num-train-epochs": "passes over the rows",
        "--max-steps": "updates at most; None: by the epochs",
        "--batch-size": "rows per update",
        "--max-length": "longest row, in tokens",
        "--learn.learning-rate": "",
        **{name: COMMON[name] for name in ("--adapter.rank", "--model.format FORMAT")},
        "--evaluate.num-prompts": "held-out rows; 0: none",
        **{name: COMMON[name] for name in ("--evaluate.every", "--checkpoint.every", "--seed", "--json")},
    },
    _SHORT,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DpoOptions(SftOptions):
    sft: Annotated[SftConfig, tyro.conf.arg(name="")] = SftConfig(max_length=1024)

    dpo: Annotated[DpoConfig, tyro.conf.arg(name="")] = DpoConfig(loss_type=("sigmoid",))

    out: str = "runs/dpo"
    """The run's folder; the same command resumes what it finds there."""

    learn: LearnConfig = LearnConfig(learning_rate=5e-6)

    def __post_init__(self):
        SftOptions.__post_init__(self)
        require(len(self.dpo.loss_type) > 0, "dpo needs a --loss-type, such as sigmoid")
        is_enough = self.batch_size > 1 or not self.dpo.has_kl
        require(is_enough, f"--loss-type kto needs --batch-size of at least 2, got {self.batch_size}")


def run(arguments: list[str]) -> None:
    options, as_json = parse_rows_options(DpoOptions, arguments, "dpo", HELP)
    losses = " and ".join(options.dpo.loss_type)
    model = f"{options.model.path} in {options.model.format}"
    announce_run(f"dpo {options.sft.data}: {losses} loss, {model}, {options.out}")
    config = run_config(options)
    check_early(config)
    from qerl.training.dpo import PreferenceTuning  # imports torch and transformers, which takes seconds
    from qerl.training.sft import fine_tune

    print_result(
        fine_tune(config, max_steps=options.max_steps, kind=PreferenceTuning),
        as_json=as_json,
    )
