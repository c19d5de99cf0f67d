"""What `qerl bench` can be told, one class for each of its benchmarks."""

import dataclasses
from pathlib import Path
from typing import Literal

from qerl.config.counts import check_counts
from qerl.errors import UserError


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
        check_counts(batches=self.batches, runs=(self.runs,))
        _check_ranks(self.lora_ranks)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchTileOptions:
    shapes: tuple[str, ...] = ("qwen2.5-7b", "qwen2.5-32b")
    """Models whose products are measured."""

    batches: tuple[Literal[32, 48, 64, 96, 128, 192, 256], ...] = (32, 48, 64, 96, 128, 192, 256)
    """The most tokens of a choice."""

    lora_rank: int = 32
    """The adapter's rank; 0 is none."""

    runs: int = 9
    """Replays of a graph, of which the median counts."""

    out: Path | None = None
    """The table's file; by default the kernels' own in the checkout."""

    allow_dirty: bool = False
    """Measure files that differ from the commit."""

    def __post_init__(self):
        check_counts(runs=(self.runs,))
        _check_ranks((self.lora_rank,))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchDecodeOptions:
    shape: str = "qwen2.5-7b"
    """The model's shape; its weights are random."""

    batches: tuple[int, ...] = (8, 32, 64, 128, 256)
    """Samples decoded at once."""

    providers: tuple[Literal["qerl-nvfp4", "qerl-bf16", "qerl-fp8-flow"], ...] = ("qerl-nvfp4", "qerl-bf16")
    """The engine with its linears in this format."""

    lora_ranks: tuple[int, ...] = (32,)
    """The adapter's rank; 0 is none."""

    noise_sigmas: tuple[float, ...] = (0.0,)
    """Standard deviation of the noise in the norms; 0 is none."""

    group_size: int = 1
    """Samples of each prompt."""

    kv: Literal["bf16", "fp8"] = "bf16"
    """What keys and values are kept in."""

    head: Literal["bf16", "fp8", "nvfp4"] = "bf16"
    """What the LM head is held in."""

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
        check_counts(batches=self.batches, runs=(self.runs,), group_size=(self.group_size,), **lengths)
        _check_ranks(self.lora_ranks)
        if min(self.noise_sigmas, default=0.0) < 0:
            raise UserError(f"noise_sigmas must not be negative, got {min(self.noise_sigmas)}")
        _check_groups(self.batches, self.group_size)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchLearnOptions:
    shape: str = "qwen2.5-7b"
    """The model's shape; its weights are random."""

    providers: tuple[Literal["qerl-nvfp4", "qerl-bf16", "qerl-fp8-flow"], ...] = ("qerl-nvfp4", "qerl-bf16")
    """The learner with its linears in this format."""

    recomputes: tuple[Literal["none", "layer", "offload"], ...] = ("none", "layer")
    """What is computed again in the backward pass, as learn.gradient_checkpointing."""

    tokens: int = 8192
    """Packed tokens in a step."""

    sequence_tokens: int = 2048
    """Tokens of each sequence in it."""

    micro_batches: tuple[int, ...] = (1,)
    """Forward and backward passes that a step is split into."""

    lora_rank: int = 32
    """The adapter's rank."""

    runs: int = 3
    """Steps, of which the median counts, after one that warms up."""

    out: Path | None = None
    """The file that rows are appended to; by default bench/results/GPU.jsonl in the checkout."""

    allow_dirty: bool = False
    """Measure files that differ from the commit; the rows say so."""

    def __post_init__(self):
        counts = {"runs": (self.runs,), "micro_batches": self.micro_batches}
        check_counts(tokens=(self.tokens,), sequence_tokens=(self.sequence_tokens,), **counts)
        _check_adapter(self.lora_rank)
        for name, count in (("micro_batches", max(self.micro_batches, default=1)), ("sequences", 1)):
            if self.tokens % (count * self.sequence_tokens):
                raise UserError(
                    f"tokens must be a multiple of {name} x sequence_tokens, got {self.tokens} for"
                    f" {count} x {self.sequence_tokens}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchStepOptions:
    shape: str = "qwen2.5-7b"
    """The model's shape; its weights are random."""

    providers: tuple[Literal["qerl-nvfp4", "qerl-bf16"], ...] = ("qerl-nvfp4", "qerl-bf16")
    """Engine and learner with their linears in this format."""

    batches: tuple[int, ...] = (8, 64)
    """Samples in a step, decoded at once."""

    group_size: int = 8
    """Samples of each prompt."""

    prompt_tokens: int = 256
    """Length of each prompt."""

    max_tokens: int = 1024
    """Length of each sample."""

    recompute: Literal["none", "layer", "offload"] = "none"
    """What is computed again in the backward pass, as learn.gradient_checkpointing."""

    micro_tokens: int = 8192
    """Most packed tokens in one forward and backward, as learn.max_tokens_per_microbatch."""

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """As learn.optim."""

    kv: Literal["bf16", "fp8"] = "bf16"
    """What keys and values are kept in."""

    kv_gb: float | None = None
    """Most memory for them, as engine.kv_cache_gb."""

    head: Literal["bf16", "fp8", "nvfp4"] = "bf16"
    """What the LM head is held in."""

    exact: bool = False
    """As engine.exact."""

    lora_rank: int = 32
    """The adapter's rank."""

    cap_gb: float | None = None
    """All that this process may take of the GPU, in 1e9 bytes."""

    steps: int = 3
    """Steps in a row, after one that warms up."""

    out: Path | None = None
    """The file that rows are appended to; by default bench/results/GPU.jsonl in the checkout."""

    allow_dirty: bool = False
    """Measure files that differ from the commit; the rows say so."""

    def __post_init__(self):
        lengths = {"prompt_tokens": (self.prompt_tokens,), "max_tokens": (self.max_tokens,)}
        counts = {"batches": self.batches, "micro_tokens": (self.micro_tokens,), "steps": (self.steps,)}
        check_counts(**lengths, **counts)
        _check_adapter(self.lora_rank)
        for name, gb in (("kv_gb", self.kv_gb), ("cap_gb", self.cap_gb)):
            if gb is not None and gb <= 0:
                raise UserError(f"{name} must be positive, got {gb}")
        if self.group_size < 2:
            raise UserError(f"group_size must be at least 2 to compare within a group, got {self.group_size}")
        _check_groups(self.batches, self.group_size)


def memory_options() -> BenchStepOptions:
    """The defaults of `qerl bench memory`."""
    return BenchStepOptions(
        shape="qwen2.5-72b",
        providers=("qerl-nvfp4",),
        batches=(8,),
        max_tokens=2048,
        recompute="offload",
        cap_gb=80,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchParityOptions:
    shape: str = "qwen2.5-7b"
    """The model's shape; its weights are random."""

    providers: tuple[Literal["qerl-nvfp4", "qerl-bf16", "qerl-fp8-flow", "flash-fp8", "flash-int8"], ...] = (
        "qerl-nvfp4",
        "qerl-bf16",
    )
    """Engine and learner with their linears in this format."""

    kvs: tuple[Literal["bf16", "fp8"], ...] = ("bf16",)
    """What keys and values are kept in while sampling."""

    heads: tuple[Literal["bf16", "fp8", "nvfp4"], ...] = ("bf16",)
    """What the LM head is held in."""

    entropies: tuple[float, ...] = (2.0,)
    """Mean entropy of a token, in nats, that the random head is scaled for."""

    exacts: tuple[bool, ...] = (False, True)
    """Without and with engine.exact."""

    batch: int = 8
    """Prompts, with one sample each."""

    prompt_tokens: int = 256
    """Length of each prompt."""

    max_tokens: int = 1024
    """Length of each sample."""

    lora_rank: int = 32
    """The adapter's rank."""

    out: Path | None = None
    """The file that rows are appended to; by default bench/results/GPU.jsonl in the checkout."""

    allow_dirty: bool = False
    """Measure files that differ from the commit; the rows say so."""

    def __post_init__(self):
        lengths = {"prompt_tokens": (self.prompt_tokens,), "max_tokens": (self.max_tokens,)}
        check_counts(batch=(self.batch,), **lengths)
        _check_adapter(self.lora_rank)
        if min(self.entropies, default=1.0) <= 0:
            raise UserError(f"entropies must be positive, got {min(self.entropies)}")


def _check_ranks(ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        if rank < 0 or rank % 16:
            raise UserError(f"lora_ranks must be multiples of 16, or 0 for none, got {rank}")


def _check_adapter(rank: int) -> None:
    if rank < 1 or rank % 16:
        raise UserError(f"lora_rank must be a multiple of 16, got {rank}")


def _check_groups(batches: tuple[int, ...], group_size: int) -> None:
    for batch in batches:
        if batch % group_size:
            raise UserError(f"batches must be multiples of group_size {group_size}, got {batch}")
