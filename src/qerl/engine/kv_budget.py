"""How much memory the KV cache may take.

    on a GPU     90 % of (free - working)     free: what this process may still allocate
    on a CPU     1e9 bytes

working is what a prefill needs beside the model: its activations, an unpacked weight and some logits. The
other 10 % is for recorded graphs and for what torch cannot give back. Learning needs no share of it: it has
the pages' memory in its turn. On a GPU without virtual memory management, where they stay where they are
between two calls, they get 60 % and leave the rest to learning.
"""

import torch

from qerl.config import EngineConfig
from qerl.kernels.gpu_memory import allowed_bytes
from qerl.kernels.virtual_memory import can_give_back
from qerl.models.decoder import Decoder

_CPU_BYTES, _SHARE, _SHARE_IF_KEPT = 1e9, 0.9, 0.6
_BLOCK_BYTES = 20 << 20  # torch takes no less of the device for a tensor over 1 MiB


def kv_bytes(config: EngineConfig, decoder: Decoder, held_bytes: int) -> float:
    """What a new cache may take in place of the one that holds held_bytes now."""
    if config.kv_cache_gb is not None or decoder.device.type == "cpu":
        return room_bytes(config, decoder, held_bytes)
    share = _SHARE if can_give_back(decoder.device) else _SHARE_IF_KEPT
    return share * room_bytes(config, decoder, held_bytes)


def room_bytes(config: EngineConfig, decoder: Decoder, held_bytes: int) -> float:
    """What a cache that was made before may take: more is there no longer once, say, the moments are."""
    if config.kv_cache_gb is not None:
        return config.kv_cache_gb * 1e9
    if decoder.device.type == "cpu":
        return _CPU_BYTES
    free = free_bytes(decoder.device) + held_bytes
    return max(free - working_bytes(config, decoder), 0.0)


def free_bytes(device: torch.device) -> float:
    """Of the device, what torch holds without using it included, but for gaps in blocks that are in use; a
    limit set for this process counts."""
    free, _ = torch.cuda.mem_get_info(device)
    gaps = torch.cuda.memory_stats(device)["inactive_split_bytes.all.current"]
    kept = torch.cuda.memory_allocated(device) + gaps
    unused = torch.cuda.memory_reserved(device) - kept
    return min(free + unused, allowed_bytes(device) - kept)


def working_bytes(config: EngineConfig, decoder: Decoder) -> float:
    """Of a prefill, roughly: a layer's activations, its largest unpacked weight, 64 rows of logits, and what
    of torch's latest block is not used."""
    a = decoder.architecture
    row = 2 * (4 * a.ff_width + 10 * a.width + 2 * (a.num_heads + 2 * a.num_kv_heads) * a.head_size)
    return (
        config.max_num_batched_tokens * row + 4 * a.ff_width * a.width + 64 * 4 * a.vocab_size + _BLOCK_BYTES
    )
