"""Sampling: the engine, and how tokens are sampled."""

import dataclasses
from typing import Literal

from qerl.config.check import check_positive
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    block_size: int = 16
    """Number of tokens per KV page."""

    kv_cache_gb: float | None = None
    """Memory limit of the KV cache, in 1e9 bytes. None: 1 on a CPU; on a GPU 90 % of what is free after the
    model and a prefill's working memory. While the learner updates, it uses the same memory."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Dtype of keys and values: auto is model.dtype; fp8 has one scale per token and head."""

    max_num_seqs: int | None = None
    """Maximum number of samples decoded at once; up to 256 with the decode kernels. None: 256 with them, else
    128; as many as the KV cache holds run."""

    max_num_batched_tokens: int | None = None
    """Maximum number of prompt tokens in one forward pass. None: 4,096, on a GPU up to 32,768 for small
    layers, whose launches take longer than their products; 16,384 with a mixture of experts, which are
    unpacked once a pass."""

    decode_steps_per_sync: int | None = None
    """Decode steps between two synchronizations with the host. None: 8 on a GPU, 1 on a CPU."""

    kernels: Literal["auto", "hopper", "portable", "torch"] = "auto"
    """Kernels of decode steps: for Hopper GPUs, for any NVIDIA GPU from Ampere on, or PyTorch's operations.
    auto: the fastest that the GPU runs."""

    exact: bool = False
    """Compute prompts, samples and the learner's logprobs with one forward pass of max_num_seqs rows, in
    which no row's bits depend on the others: sampler and learner then differ by noise only."""

    def __post_init__(self):
        check_positive(self, "block_size", "kv_cache_gb", "decode_steps_per_sync", prefix="engine.")
        check_positive(self, "max_num_seqs", "max_num_batched_tokens", prefix="engine.")

    def max_rows(self, *, has_kernels: bool) -> int:
        """Return max_num_seqs, resolved. has_kernels: decode steps use the decode kernels."""
        return self.max_num_seqs or (256 if has_kernels and not self.exact else 128)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig:
    """Sampling parameters."""

    max_tokens: int = 1024
    """Maximum length of a sample, stop token included; with an environment, of all turns and replies
    together; with an agent, of one answer."""

    temperature: float = 1.0
    """Divides the logits, in sampling and in learning."""

    top_k: int | None = None
    """Sample from the k most likely tokens. The learner's policy is not truncated."""

    top_p: float | None = None
    """Sample from the smallest set of tokens with this total probability."""

    min_p: float | None = None
    """Drop tokens below this fraction of the most likely token's probability."""

    stop: tuple[str, ...] = ()
    """Strings that end a sample."""

    def __post_init__(self):
        check_positive(self, "max_tokens", "temperature", "top_k", prefix="sample.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            require(value is None or 0 < value <= 1, f"sample.{name} must be in (0, 1], got {value}")
