"""Plan the GPU memory of a training step, part by part, without loading the model."""

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from qerl.cli.arguments import announce, expand, names_of, names_or_help, parse_options
from qerl.cli.dpo import DpoOptions
from qerl.cli.help import Help
from qerl.cli.sft import SftOptions, run_config
from qerl.cli.train import COMMON, SHORT
from qerl.config import RunConfig
from qerl.config.check import check_numbers, check_positive
from qerl.config.recipes import RECIPES
from qerl.errors import UserError, require

if TYPE_CHECKING:
    from qerl.learner.plan.speed import Gpu  # imports torch, which takes seconds

DESCRIPTION = f"""{__doc__}

MODEL is a folder, a .gguf file, a hub id, a shape such as qwen2.5-7b, or a recipe, which also sets the
other fields.
The options after --mean-tokens are those of `qerl train`. It exits with 1 if the run does not fit.

  qerl plan sft MODEL, qerl plan dpo MODEL  the same for stored rows, with the options of `qerl sft`, `dpo`"""

_FIELDS = (
    "--num-prompts",
    "--num-generations",
    "--sample.max-tokens",
    "--adapter.rank",
    "--model.format FORMAT",
)
HELP = Help(
    DESCRIPTION,
    {
        "--gpu NAME": "such as rtx-4090; default: this machine's",
        "--gpu-gb": "memory of the GPU, in units of 1e9 bytes",
        "--prompt-tokens": "",
        "--mean-tokens": "expected length of the samples",
        "--num-steps": "steps of the run",
        "--adapters N": "clients of `qerl tinker`",
        **{name: COMMON[name] for name in _FIELDS},
        "--model.format FORMAT": COMMON["--model.format FORMAT"],
        "--learn.max-tokens-per-microbatch N": "None: as memory allows",
        "--learn.gradient-checkpointing": "",
        "--engine.max-num-seqs": "",
        "--engine.kv-cache-gb": "",
        "--engine.kv-cache-dtype": "",
        "--model.head-format": "",
    },
    SHORT,
)


STORED_HELP = Help(
    "Plan the GPU memory and the time of a run over stored rows, without loading the model or the rows.",
    {
        "--gpu NAME": "such as rtx-4090; default: this machine's",
        "--gpu-gb": "memory of the GPU, in units of 1e9 bytes",
        "--prompt-tokens": "",
        "--completion-tokens": "",
        "--num-rows": "rows of the data",
        "--batch-size": "rows per update",
        "--max-length": "longest row, in tokens",
        **{name: COMMON[name] for name in ("--adapter.rank", "--model.format FORMAT")},
        "--learn.gradient-checkpointing": "",
    },
)


_PROMPT_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SftPlanOptions:
    gpu: str | None = None
    """The GPU by name, such as rtx-4090 or h100; default: the one in this machine."""

    gpu_gb: float | None = None
    """Memory of the GPU, in units of 1e9 bytes, instead of what the GPU's name says."""

    prompt_tokens: int | None = None
    """Mean length of the prompts, in tokens; default: 256, or half of sft.max_length if that is less."""

    completion_tokens: int | None = None
    """Mean length of the completions, in tokens, for the time; default: up to max_length."""

    num_rows: int = 1000
    """Rows of the data, for the time."""

    run: Annotated[SftOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=SftOptions)
    """The run, with the options of its command."""

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "gpu_gb", "prompt_tokens", "completion_tokens", "num_rows")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DpoPlanOptions(SftPlanOptions):
    run: Annotated[DpoOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=DpoOptions)
    """The run, with the options of its command."""


_STORED: dict[str, type[SftPlanOptions]] = {"sft": SftPlanOptions, "dpo": DpoPlanOptions}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    gpu: str | None = None
    """The GPU by name, such as rtx-4090 or h100; default: the one in this machine."""

    gpu_gb: float | None = None
    """Memory of the GPU, in units of 1e9 bytes, instead of what the GPU's name says."""

    prompt_tokens: int = 256
    """Length of each prompt, in tokens."""

    mean_tokens: int | None = None
    """Expected mean length of the samples, in tokens, for the speed; default: sample.max_tokens."""

    adapters: int | None = None
    """Training clients of `qerl tinker`: their adapters, of adapter.rank, in memory beside one base."""

    run: Annotated[RunConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=RunConfig)
    """The run, with the fields of `qerl train`."""

    def __post_init__(self):
        check_numbers(self)
        check_positive(self, "gpu_gb", "prompt_tokens", "mean_tokens", "adapters")
        limit = self.run.sample.max_tokens
        require(
            self.mean_tokens is None or self.mean_tokens <= limit,
            f"mean_tokens must not exceed sample.max_tokens ({limit}), got {self.mean_tokens}",
        )


def run(arguments: list[str]) -> None:
    if arguments[:1] in (["sft"], ["dpo"]):
        run_stored(arguments[0], arguments[1:])
        return
    names, arguments = names_or_help(PlanOptions, arguments, "plan MODEL", HELP)
    if len(names) != 1:
        example = "qerl plan qwen2.5-7b --gpu rtx-4090, or --gpu-gb GB"
        raise UserError(f"plan needs one model, shape or recipe: {example}")
    is_recipe, arguments = names[0] in RECIPES, expand(arguments, SHORT)
    require(
        is_recipe or "--model.path" not in names_of(arguments),
        f"plan {names[0]} names the model; give --model to a recipe",
    )
    default = PlanOptions(run=RECIPES[names[0]]()) if is_recipe else PlanOptions()
    options = parse_options(PlanOptions, arguments, f"plan {names[0]}", default, HELP)
    announce(f"plan {names[0]}: {options.run.model.format}", sys.stderr)
    from qerl.learner.plan.report import format_plan
    from qerl.learner.plan.shapes import check_name

    model = options.run.model.path if is_recipe else names[0]
    check_name(model)  # before the GPU: a wrong name is the first error
    gpu, gpu_gb = _gpu(options.gpu, options.gpu_gb)
    lengths = {"prompt_tokens": options.prompt_tokens, "mean_tokens": options.mean_tokens}
    sizes = {"gpu": gpu, "gpu_gb": gpu_gb, "num_adapters": options.adapters}
    text, fits = format_plan(model, options.run, **sizes, **lengths)
    print(text)
    if not fits:
        sys.exit(1)


def run_stored(command: str, arguments: list[str]) -> None:
    """Plan a run of `qerl sft` or `qerl dpo`."""
    kind, usage = _STORED[command], f"plan {command}"
    names, arguments = names_or_help(kind, arguments, f"{usage} MODEL", STORED_HELP)
    if len(names) != 1:
        raise UserError(f"{usage} needs one model or shape: qerl {usage} qwen2.5-7b --gpu rtx-4090")
    options = parse_options(kind, arguments, f"{usage} {names[0]}", kind(), STORED_HELP)
    announce(f"{usage} {names[0]}: {options.run.model.format}", sys.stderr)
    from qerl.learner.plan.shapes import check_name
    from qerl.learner.plan.stored import RowLengths, format_stored_plan

    check_name(names[0])
    gpu, gpu_gb = _gpu(options.gpu, options.gpu_gb)
    rows = dataclasses.replace(options.run.sft, data=options.run.sft.data or "rows")  # are not read
    config = run_config(dataclasses.replace(options.run, sft=rows))
    longest = options.run.sft.max_length
    prompt_tokens = options.prompt_tokens or min(_PROMPT_TOKENS, (longest or 2 * _PROMPT_TOKENS) // 2)
    rest = max((longest or 2 * prompt_tokens) - prompt_tokens, 1)
    text, fits = format_stored_plan(
        names[0],
        config,
        gpu=gpu,
        gpu_gb=gpu_gb,
        lengths=RowLengths(prompt_tokens=prompt_tokens, completion_tokens=options.completion_tokens or rest),
        num_rows=options.num_rows,
        max_steps=options.run.max_steps,
    )
    print(text)
    if not fits:
        sys.exit(1)


def _gpu(name: str | None, memory_gb: float | None) -> tuple["Gpu | None", float]:
    """Return the named GPU, or else this machine's, None if it is unknown; and its memory in units of 1e9."""
    from qerl.learner.plan.speed import gpu_named, gpu_of_cuda_name

    if name is not None:
        gpu = gpu_named(name)
        return gpu, memory_gb or gpu.memory_gb
    if memory_gb is not None:
        return None, memory_gb
    import torch

    if not torch.cuda.is_available():
        raise UserError("plan needs --gpu NAME or --gpu-gb GB: this machine has no GPU")
    card = torch.cuda.get_device_properties(0)
    return gpu_of_cuda_name(card.name), card.total_memory / 1e9
