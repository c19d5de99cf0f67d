"""Options of `qerl bench`, one class per benchmark."""

import dataclasses
from pathlib import Path
from typing import Literal

from qerl.config.check import check_not_negative, check_positive
from qerl.errors import UserError, require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """The options that every benchmark has."""

    shape: str = "qwen2.5-7b"
    """Shape of the model; its weights are random."""

    out: Path | None = None
    """File to append rows to; default: benchmarks/results/GPU.jsonl in a checkout, no file elsewhere."""

    allow_dirty: bool = False
    """Measure a checkout with uncommitted changes; the rows are marked dirty."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchSamplingOptions(BenchOptions):
    """Those of the benchmarks that sample."""

    kv: Literal["bf16", "fp8"] = "bf16"
    """Data type of the KV cache, as engine.kv_cache_dtype."""

    head: Literal["bf16", "fp8", "nvfp4"] = "bf16"
    """Format of the LM head, as model.head_format."""

    kernels: Literal["auto", "hopper", "portable", "torch"] = "auto"
    """Kernels of decode steps, as engine.kernels."""

    prompt_tokens: int = 256
    """Tokens per prompt."""


DecodeProvider = Literal[
    "qerl-nvfp4", "qerl-mxfp4", "qerl-nf4", "qerl-fp8", "qerl-int8", "qerl-bf16", "qerl-fp8-flow"
]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchDecodeOptions(BenchSamplingOptions):
    batches: tuple[int, ...] = (8, 32, 64, 128, 256)
    """Samples decoded in parallel, one case per value."""

    providers: tuple[DecodeProvider, ...] = ("qerl-nvfp4", "qerl-bf16")
    """Formats of the frozen linear weights."""

    lora_ranks: tuple[int, ...] = (32,)
    """LoRA ranks; 0 is no adapter."""

    noise_sigmas: tuple[float, ...] = (0.0,)
    """Standard deviations of the noise in the norm weights; 0 is no noise."""

    group_size: int = 1
    """Samples per prompt."""

    max_tokens: int = 1024
    """Tokens per sample."""

    runs: int = 3
    """Number of rollouts; the row holds their median."""

    def __post_init__(self):
        check_positive(self, "batches", "runs", "group_size", "prompt_tokens", "max_tokens")
        check_not_negative(self, "noise_sigmas", "lora_ranks")
        _check_groups(self.batches, self.group_size)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchRolloutOptions(BenchSamplingOptions):
    providers: tuple[Literal["qerl-nvfp4", "qerl-bf16"], ...] = ("qerl-nvfp4", "qerl-bf16")
    """Formats of the frozen linear weights."""

    num_samples: int = 256
    """Samples of a rollout."""

    rows: int = 256
    """Samples decoded at once, as engine.max_num_seqs."""

    group_size: int = 8
    """Samples per prompt."""

    lengths: Literal["log-normal", "constant"] = "log-normal"
    """Distribution of the samples' lengths; each sample ends at its own, and no token stops it before."""

    median_tokens: int = 600
    """Median length of a sample."""

    sigma: float = 0.8
    """Standard deviation of a log-normal length's logarithm."""

    max_tokens: int = 4096
    """Longest sample; a longer one is cut to it."""

    seed: int = 0
    """Seed of the lengths."""

    lora_rank: int = 32
    """LoRA rank; 0 is no adapter."""

    runs: int = 3
    """Rollouts after the first one; the row holds their median."""

    def __post_init__(self):
        check_positive(self, "num_samples", "rows", "group_size", "prompt_tokens", "median_tokens", "runs")
        check_positive(self, "sigma", "max_tokens")
        check_not_negative(self, "lora_rank")
        size = self.group_size
        require(
            self.num_samples % size == 0,
            f"num_samples must be a multiple of group_size {size}, got {self.num_samples}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchLearnOptions(BenchOptions):
    providers: tuple[Literal["qerl-nvfp4", "qerl-mxfp4", "qerl-bf16", "qerl-fp8-flow"], ...] = (
        "qerl-nvfp4",
        "qerl-bf16",
    )
    """Formats of the frozen linear weights."""

    recomputes: tuple[Literal["none", "layer", "offload"], ...] = ("none", "layer")
    """Activations to recompute in the backward pass, as learn.gradient_checkpointing."""

    backward: Literal["bf16", "int8"] = "bf16"
    """Numbers of the backward pass's products, as learn.backward."""

    tokens: int = 8192
    """Packed tokens per update."""

    sequence_tokens: int = 2048
    """Tokens per sequence."""

    micro_batches: tuple[int, ...] = (1,)
    """Micro-batches per update, one case per value."""

    num_samples: int = 0
    """Learn from this many samples of a rollout, whose lengths differ, and not from sequences of equal
    length."""

    micro_tokens: tuple[int, ...] = (8192,)
    """Maximum packed tokens per micro-batch with num_samples, one case per value."""

    lora_rank: int = 32
    """LoRA rank."""

    expert_rank: int = 0
    """LoRA rank of each expert's adapters, as adapter.expert_rank; 0 is no adapter."""

    runs: int = 3
    """Number of updates after a warm-up; the row holds their median."""

    def __post_init__(self):
        check_positive(self, "tokens", "sequence_tokens", "runs", "micro_batches", "micro_tokens")
        check_positive(self, "lora_rank")
        check_not_negative(self, "expert_rank", "num_samples")
        require(self.num_samples % 8 == 0, f"num_samples must be a multiple of 8, got {self.num_samples}")
        for name, count in (("micro_batches", max(self.micro_batches, default=1)), ("sequences", 1)):
            if self.tokens % (count * self.sequence_tokens):
                raise UserError(
                    f"tokens must be a multiple of {name} x sequence_tokens, got {self.tokens} for"
                    f" {count} x {self.sequence_tokens}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchStepOptions(BenchSamplingOptions):
    providers: tuple[Literal["qerl-nvfp4", "qerl-mxfp4", "qerl-bf16"], ...] = ("qerl-nvfp4", "qerl-bf16")
    """Formats of the frozen linear weights."""

    batches: tuple[int, ...] = (8, 64)
    """Samples per step, decoded in parallel; one case per value."""

    group_size: int = 8
    """Samples per prompt."""

    max_tokens: int = 1024
    """Tokens per sample."""

    recompute: Literal["auto", "none", "layer", "offload"] = "none"
    """Activations to recompute in the backward pass, as learn.gradient_checkpointing; auto: what fits."""

    backward: Literal["bf16", "int8"] = "bf16"
    """Numbers of the backward pass's products, as learn.backward."""

    micro_tokens: int = 8192
    """Maximum packed tokens per micro-batch, as learn.max_tokens_per_microbatch."""

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """Optimizer, as learn.optim."""

    kv_gb: float | None = None
    """Maximum size of the KV cache, as engine.kv_cache_gb."""

    memory: bool = False
    """Measure the peak memory of each step; the learner then keeps no unpacked operands of the weights."""

    exact: bool = False
    """Sample in exact mode, as engine.exact."""

    lora_rank: int = 32
    """LoRA rank."""

    expert_rank: int = 0
    """LoRA rank of each expert's adapters, as adapter.expert_rank; 0 is no adapter."""

    cap_gb: float | None = None
    """Maximum GPU memory of this process, in units of 1e9 bytes."""

    steps: int = 3
    """Number of steps after a warm-up; times are their medians."""

    def __post_init__(self):
        check_positive(self, "prompt_tokens", "max_tokens", "batches", "steps")
        check_positive(self, "micro_tokens", "kv_gb", "cap_gb", "lora_rank")
        check_not_negative(self, "expert_rank")
        require(self.group_size >= 2, f"group_size must be at least 2, got {self.group_size}")
        _check_groups(self.batches, self.group_size)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchTuneOptions:
    shapes: tuple[str, ...] = ("qwen2.5-7b",)
    """Models whose linears are measured."""

    lora_rank: int = 32
    """LoRA rank; 0 is no adapter."""

    max_batch: int = 256
    """Largest number of samples in parallel."""

    runs: int = 5
    """Replays of the CUDA graph; the median is kept."""

    def __post_init__(self):
        check_positive(self, "max_batch", "runs")
        check_ranks((self.lora_rank,))


def check_ranks(ranks: tuple[int, ...]) -> None:
    """Raise UserError if the kernels of one product do not have a rank."""
    for rank in ranks:
        if rank < 0 or rank % 16:
            raise UserError(f"lora_ranks must be multiples of 16, or 0 for no adapter, got {rank}")


def _check_groups(batches: tuple[int, ...], group_size: int) -> None:
    for batch in batches:
        require(batch % group_size == 0, f"batches must be multiples of group_size {group_size}, got {batch}")
