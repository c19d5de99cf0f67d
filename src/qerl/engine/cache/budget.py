"""Memory budget of the KV cache.

    on a GPU     90 % of (free - working - by row)     free: memory that this process may still allocate
    on a CPU     1e9 bytes

working is what a prefill needs besides the model: activations, an unpacked weight and some logits; by row,
what a bank of adapters takes once requests name them (engine/decode/group_bank.py). The other
10 % is for CUDA graphs and for memory that torch cannot return. Learning needs no share, because it uses the
pages' memory while the cache is not present. On a GPU without virtual memory management the pages stay
allocated between two calls; they then get 60 % and leave the rest to learning.
"""

import torch

from qerl.config import EngineConfig
from qerl.cost.prefill import batched_tokens, prefill_row_bytes
from qerl.cost.weights import row_adapter_bytes
from qerl.kernels.runtime.gpu_memory import allowed_bytes, memory_bytes
from qerl.kernels.runtime.virtual_memory import can_give_back
from qerl.models.decoder import Decoder

SHARE = 0.9
"""Share of the free memory that the KV cache takes."""
_CPU_BYTES, _SHARE_IF_RESIDENT = 1e9, 0.6
_BLOCK_BYTES = 20 << 20  # smallest block that torch allocates for a tensor over 1 MiB


def new_cache_bytes(config: EngineConfig, decoder: Decoder, resident_bytes: int) -> float:
    """Return the size of a new cache that replaces the one holding resident_bytes now."""
    max_bytes = max_cache_bytes(config, decoder, resident_bytes)
    if config.kv_cache_gb is not None or decoder.device.type == "cpu":
        return max_bytes
    share = SHARE if can_give_back(decoder.device) else _SHARE_IF_RESIDENT
    return max(max_bytes - by_row_bytes(decoder), 0.0) * share


def by_row_bytes(decoder: Decoder) -> float:
    """Return the memory of a full adapter bank, the decoder's own or one that takes its place at times."""
    if (bank := decoder.adapter_bank or decoder.reserved_bank) is None:
        return 0.0
    widths = sum(linear.in_width + linear.out_width for _, linear in decoder.linears())
    each = {"max_rank": bank.max_rank, "max_adapters": bank.max_adapters}
    return row_adapter_bytes(widths, decoder.compute.itemsize, num_adapters=bank.max_adapters, **each)


def max_cache_bytes(config: EngineConfig, decoder: Decoder, resident_bytes: int) -> float:
    """Return the largest size at which an existing cache is kept. It exceeds new_cache_bytes because memory
    has been used since the cache was made, e.g. by optimizer states."""
    if config.kv_cache_gb is not None:
        return config.kv_cache_gb * 1e9
    if decoder.device.type == "cpu":
        return _CPU_BYTES
    free = free_bytes(decoder.device) + resident_bytes
    return max(free - working_bytes(config, decoder), 0.0)


def free_bytes(device: torch.device) -> float:
    """Return the free device memory, including what torch has reserved but not used, except gaps in blocks
    that are in use. A memory limit set for this process applies."""
    free, _ = torch.cuda.mem_get_info(device)
    gaps = torch.cuda.memory_stats(device)["inactive_split_bytes.all.current"]
    used = torch.cuda.memory_allocated(device) + gaps
    unused = torch.cuda.memory_reserved(device) - used
    return min(free + unused, allowed_bytes(device) - used)


def working_bytes(config: EngineConfig, decoder: Decoder) -> float:
    """Estimate the memory of a prefill: a layer's activations, also recurrent ones and those of experts, its
    largest unpacked weight, 64 rows of logits, and the unused part of torch's latest block."""
    a = decoder.architecture
    rows = batched_tokens(config, a, memory_bytes(decoder.device))
    return rows * prefill_row_bytes(a) + 4 * a.ff_width * a.width + 64 * 4 * a.vocab_size + _BLOCK_BYTES
