"""Compute the least time that a GPU's memory bandwidth and matrix rate allow.

    floor = max(bytes / read bandwidth,  operations / matrix rate)

    linear  bytes = weights + adapter                      operations = 2 batch (weights + adapter)
    decode  bytes = weights + head + adapter + KV cache    operations = 2 batch (weights + head + adapter)

Weights count in their format, and so does a packed head; a bfloat16 head counts in the format of the
linears. The adapter counts in bfloat16. The cache counts at the mean context of a sample, prompt +
max_tokens / 2, where samples share their prompt. Attention's operations and activations are left out.
tests/cli/bench/test_roofline.py checks it by hand.
"""

import dataclasses

from qerl.formats import FORMATS
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import layer_spec

_ADAPTER_BYTES = 2
_KV_BYTES = {"bf16": 2, "fp8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Measured rates: reading memory, and dense bfloat16 products of 8192 x 8192."""

    bytes_per_s: float
    flop_per_s: float

    def least_ms(self, num_bytes: float, num_flop: float) -> float:
        return 1e3 * max(num_bytes / self.bytes_per_s, num_flop / self.flop_per_s)


LIMITS = {"NVIDIA H200": Limit(bytes_per_s=4.5e12, flop_per_s=790e12)}
"""By GPU name; rows of other GPUs have no floor."""


def linear_floor_ms(
    limit: Limit, a: Architecture, *, bytes_per_weight: float, rank: int, batch: int
) -> float:
    """Return the least time of the four products of all layers."""
    weights, adapter = _layer_weights(a, rank)
    num_bytes = weights * bytes_per_weight + adapter * _ADAPTER_BYTES
    return limit.least_ms(num_bytes, 2 * batch * (weights + adapter))


def step_floor_ms(
    limit: Limit,
    a: Architecture,
    *,
    format: str,
    rank: int,
    batch: int,
    prompt_tokens: int,
    max_tokens: int,
    group_size: int = 1,
    kv: str = "bf16",
    head: str = "bf16",
) -> float:
    """Return the least time of a mean decode step: a token for each of `batch` samples."""
    weights, adapter = _layer_weights(a, rank)
    head_weights = a.vocab_size * a.width
    cached_tokens = batch * max_tokens / 2 + batch / group_size * prompt_tokens
    token_bytes = 2 * a.num_layers * a.num_kv_heads * a.head_size * _KV_BYTES[kv]
    num_bytes = weights * FORMATS[format].bytes_per_weight + adapter * _ADAPTER_BYTES
    num_bytes += head_weights * FORMATS[format if head == "bf16" else head].bytes_per_weight
    return limit.least_ms(
        num_bytes + cached_tokens * token_bytes, 2 * batch * (weights + head_weights + adapter)
    )


def _layer_weights(a: Architecture, rank: int) -> tuple[int, int]:
    """Return the number of frozen weights and of adapter weights of all layers."""
    each = layer_spec(a).groups
    weights = sum(gemm.num_weights for gemm in each)
    adapter = sum(gemm.num_adapter_weights(rank) for gemm in each)
    return a.num_layers * weights, a.num_layers * adapter
