"""Compute the least time that a GPU's memory bandwidth and matrix rate allow.

    floor = max(bytes / read bandwidth,  operations / matrix rate)

    bytes = weights + head + adapter + KV cache + 2 states    operations = 2 batch (weights + head + adapter)

Linears and head count in their formats, the adapter in bfloat16. The cache counts at the mean context of a
sample, prompt + max_tokens / 2, where samples share their prompt. Recurrent states are read and written once
a sample. Attention's operations and activations are left out.

Of a mixture a step reads the experts that its rows chose (experts_read). Linears that stay in bfloat16, such
as routers, count so, and routers have no adapter.
tests/bench/test_roofline.py checks it by hand.
"""

import dataclasses

import torch

from qerl import formats
from qerl.bench.case import FORMATS, DecodeCase, SamplingCase
from qerl.cost.cache import slot_bytes, token_bytes
from qerl.cost.weights import counted_groups, expert_weights, experts_read, linear_weights, num_active_params
from qerl.models.architecture import Architecture

ADAPTER_BYTES = 2


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
    (quantized, plain), adapter = linear_weights(a), adapter_weights(a, case.lora_rank)
    quantized += expert_weights(a) * experts_read(a, num_rows)
    format = FORMATS[case.provider]
    num_bytes = quantized * formats.FORMATS[format].bytes_per_weight + (plain + adapter) * ADAPTER_BYTES
    num_bytes += a.vocab_size * a.width * formats.FORMATS[case.head].bytes_per_weight
    num_bytes += 2 * num_rows * slot_bytes(a, torch.bfloat16)  # states, read and written
    num_flop = 2 * num_rows * (num_active_params(a) + adapter)
    return limit.least_ms(num_bytes + cached_tokens * token_bytes(a, case.kv), num_flop)


def adapter_weights(a: Architecture, rank: int) -> int:
    """Return the number of weights of the adapters of all linears but routers and experts."""
    return sum(n * x.num_adapter_weights(rank) for x, n in counted_groups(a) if x.name != "router")
