"""Compute the least time that a GPU's memory bandwidth and matrix rate allow.

    floor = max(bytes / read bandwidth,  operations / matrix rate)

    bytes = weights + head + adapter + KV cache + 2 states    operations = 2 batch (weights + head + adapter)

Linears and head count in their formats, the adapter in bfloat16. The cache counts at the mean context of a
sample, prompt + max_tokens / 2, where samples share their prompt. Recurrent states are read and written once
a sample. Attention's operations and activations are left out.

Of a mixture's E experts a step reads those that its rows chose, E (1 - (1 - k / E)^rows) of them if each row
chooses k at random. Linears that stay in bfloat16, such as routers, count so, and routers have no adapter.
tests/bench/test_roofline.py checks it by hand.
"""

import dataclasses

import torch

from qerl import formats
from qerl.bench.case import FORMATS, DecodeCase, SamplingCase
from qerl.engine.cache.state_cache import slot_bytes
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import layer_specs

ADAPTER_BYTES = 2
_KV_BYTES = {"bf16": 2, "fp8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Measured rates: reading memory, and dense bfloat16 products of 8192 x 8192."""

    bytes_per_s: float
    flop_per_s: float

    def least_ms(self, num_bytes: float, num_flop: float) -> float:
        return 1e3 * max(num_bytes / self.bytes_per_s, num_flop / self.flop_per_s)


LIMITS = {
    "NVIDIA H200": Limit(bytes_per_s=4.5e12, flop_per_s=790e12),
    "NVIDIA H100 80GB HBM3": Limit(bytes_per_s=3.1e12, flop_per_s=713e12),
}
"""By GPU name, from `python -m benchmarks limits`; rows of other GPUs have no floor."""


def step_floor_ms(limit: Limit, a: Architecture, case: DecodeCase) -> float:
    """Return the least time of a mean decode step: a token for each of `case.batch` samples."""
    cached_tokens = case.batch * case.max_tokens / 2 + case.batch / case.group_size * case.prompt_tokens
    return rows_floor_ms(limit, a, case, case.batch, cached_tokens)


def rows_floor_ms(
    limit: Limit, a: Architecture, case: SamplingCase, num_rows: int, cached_tokens: float
) -> float:
    """Return the least time of a decode step of num_rows samples that reads the cache of cached_tokens."""
    specs, (weights, adapter) = layer_specs(a), layer_weights(a, case.lora_rank)
    plain = sum(group.num_weights for spec in specs for group in spec.groups if not group.is_quantized)
    expert_weights = sum(x.num_weights // x.num_experts for spec in specs for x in spec.experts)
    quantized = weights - plain + expert_weights * experts_read(a, num_rows)
    head_weights, format = a.vocab_size * a.width, FORMATS[case.provider]
    token_bytes = 2 * a.kv_elements * _KV_BYTES[case.kv]
    num_bytes = quantized * formats.FORMATS[format].bytes_per_weight + (plain + adapter) * ADAPTER_BYTES
    num_bytes += head_weights * formats.FORMATS[case.head].bytes_per_weight
    num_bytes += 2 * num_rows * slot_bytes(a, torch.bfloat16)  # states, read and written
    chosen = 0 if a.mixture is None else a.mixture.num_chosen
    num_flop = 2 * num_rows * (weights + chosen * expert_weights + head_weights + adapter)
    return limit.least_ms(num_bytes + cached_tokens * token_bytes, num_flop)


def experts_read(a: Architecture, num_rows: int) -> float:
    """Return how many experts of a layer a step of so many rows is expected to read."""
    if a.mixture is None:
        return 0
    experts, chosen = a.mixture.num_experts, a.mixture.num_chosen
    return experts * (1 - (1 - chosen / experts) ** num_rows)


def layer_weights(a: Architecture, rank: int) -> tuple[int, int]:
    """Return the number of frozen weights and of adapter weights of all layers, without experts."""
    each = [group for spec in layer_specs(a) for group in spec.groups]
    weights = sum(gemm.num_weights for gemm in each)
    adapter = sum(gemm.num_adapter_weights(rank) for gemm in each if gemm.name != "router")
    return weights, adapter
