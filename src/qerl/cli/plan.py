"""Plan the GPU memory of a training step, part by part, without loading the model."""

import dataclasses
import math
from typing import Annotated

import tyro

from qerl.cli.arguments import parse_options, split_names, wants_help
from qerl.config import RunConfig
from qerl.config.check import check_positive
from qerl.config.renamed import refuse_former_names
from qerl.errors import UserError

DESCRIPTION = f"""{__doc__}

MODEL is a folder, a .gguf file, a hub id, or a shape such as qwen2.5-7b.
The fields after --prompt-tokens are those of `qerl train`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpu_gb: float
    """Memory of the GPU, in units of 1e9 bytes."""

    prompt_tokens: int = 256
    """Length of each prompt, in tokens."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RunConfig)
    """The run, with the fields of `qerl train`."""

    def __post_init__(self):
        if not 0 < self.gpu_gb < math.inf:
            raise UserError(f"gpu_gb must be positive, got {self.gpu_gb}")
        check_positive(self, "prompt_tokens")


def run(arguments: list[str]) -> None:
    if wants_help(arguments):
        parse_options(PlanOptions, arguments, "plan MODEL", description=DESCRIPTION)
    names, arguments = split_names(arguments)
    if len(names) != 1:
        raise UserError("plan needs one model or the name of a shape: qerl plan MODEL --gpu-gb GB")
    refuse_former_names(arguments)
    options = parse_options(PlanOptions, arguments, f"plan {names[0]}", description=DESCRIPTION)
    from qerl.learner.plan.report import format_plan

    print(format_plan(names[0], options.run, gpu_gb=options.gpu_gb, prompt_tokens=options.prompt_tokens))
