"""What the commands other than train can be told."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from qerl.config import ModelConfig, TaskConfig
from qerl.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    with_adapter: bool = True
    """Of a run: with what it learned (its newest checkpoint), or without."""

    num_prompts: int = 256
    """Problems to try."""

    num_samples: int = 4
    """Samples of each problem at the temperature."""

    temperature: float = 1.0
    """Divides the logits; the greedy figure is always given too."""

    top_p: float | None = None
    """Draw from the smallest set of tokens with this much probability."""

    max_tokens: int = 1024
    """Longest sample."""

    seed: int = 0
    """Names the random numbers of the samples, and the problems of a procedural task."""

    right_from: float = 1.0
    """A sample counts as right when its reward is at least this."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeOptions:
    model: tyro.conf.Positional[str]
    """A folder with safetensors, a .gguf file, a hub id, or smollm2-135m-instruct."""

    out: tyro.conf.Positional[Path]
    """The folder to write."""

    format: Literal["nvfp4"] = "nvfp4"
    """The weights' format."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that `qerl train` wrote."""

    out: Path | None = None
    """The page; by default report.html in the first run's folder."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchLinearOptions:
    shape: str = "qwen2.5-7b"
    """The model whose linears are measured."""

    batches: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    """Tokens in a step."""

    providers: tuple[Literal["qerl-nvfp4", "cublas-bf16", "humming", "bitsandbytes-nf4"], ...] = (
        "qerl-nvfp4",
        "cublas-bf16",
    )
    """What multiplies; humming and bitsandbytes-nf4 need packages of their own."""

    lora_ranks: tuple[int, ...] = (0, 32)
    """The adapter's rank; 0 is none."""

    runs: int = 21
    """Replays of the graph, of which the median counts."""

    out: Path | None = None
    """The file that rows are appended to; by default bench/results/GPU.jsonl in the checkout."""

    allow_dirty: bool = False
    """Measure files that differ from the commit; the rows say so."""

    def __post_init__(self):
        _check_counts(batches=self.batches, runs=(self.runs,))
        _check_ranks(self.lora_ranks)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchDecodeOptions:
    shape: str = "qwen2.5-7b"
    """The model's shape; its weights are random."""

    batches: tuple[int, ...] = (8, 32, 64, 128, 256)
    """Samples decoded at once."""

    providers: tuple[Literal["qerl-nvfp4", "qerl-bf16"], ...] = ("qerl-nvfp4", "qerl-bf16")
    """The engine with its linears in this format."""

    lora_ranks: tuple[int, ...] = (32,)
    """The adapter's rank; 0 is none."""

    noise_sigmas: tuple[float, ...] = (0.0,)
    """Standard deviation of the noise in the norms; 0 is none."""

    group_size: int = 1
    """Samples of each prompt."""

    kv: Literal["bf16", "fp8"] = "bf16"
    """What keys and values are kept in."""

    prompt_tokens: int = 256
    """Length of each prompt."""

    max_tokens: int = 1024
    """Length of each sample."""

    runs: int = 3
    """Calls of generate, of which the median counts."""

    out: Path | None = None
    """The file that rows are appended to; by default bench/results/GPU.jsonl in the checkout."""

    allow_dirty: bool = False
    """Measure files that differ from the commit; the rows say so."""

    def __post_init__(self):
        lengths = {"prompt_tokens": (self.prompt_tokens,), "max_tokens": (self.max_tokens,)}
        _check_counts(batches=self.batches, runs=(self.runs,), group_size=(self.group_size,), **lengths)
        _check_ranks(self.lora_ranks)
        if min(self.noise_sigmas, default=0.0) < 0:
            raise UserError(f"noise_sigmas must not be negative, got {min(self.noise_sigmas)}")
        for batch in self.batches:
            if batch % self.group_size:
                raise UserError(f"batches must be multiples of group_size {self.group_size}, got {batch}")


def _check_counts(**values: tuple[int, ...]) -> None:
    for name, each in values.items():
        if min(each, default=1) < 1:
            raise UserError(f"{name} must be positive, got {min(each)}")


def _check_ranks(ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        if rank < 0 or rank % 16:
            raise UserError(f"lora_ranks must be multiples of 16, or 0 for none, got {rank}")
