"""List the kernels of a run's decode steps from the model's config.json, before any weight is read.

Those that write a prefill's keys and values are listed too.
"""

import torch

from qerl.config import EngineConfig
from qerl.cost.cache import FP8
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.cache.state_cache import StateCache
from qerl.engine.decode.runner_cache import RunnerCache
from qerl.engine.schedule.page_pool import num_pages
from qerl.kernels.runtime.nvrtc import KernelVariant, dry_run
from qerl.models.decoder import Decoder
from qerl.models.device import Kernels
from qerl.types import Sampling


@torch.no_grad()
def planned_kernels(
    decoder: Decoder, config: EngineConfig, sampling: Sampling, kernels: Kernels, *, num_positions: int
) -> list[KernelVariant]:
    """Return the kernels that an engine would compile before its first step, in the order of their launches,
    and those that write to the cache in a prefill.

    decoder: without memory (models/meta_decoder.py); kernels: those chosen for the GPU; num_positions: of the
    longest sequence that is expected. None are listed where PyTorch's operations are used.
    """
    runners, a = RunnerCache(decoder, config, frozenset((0,)), kernels), decoder.architecture
    states = None if a.delta is None else StateCache(a, 1, decoder.compute, decoder.device)
    dtype = FP8 if config.kv_cache_dtype == "fp8" else decoder.compute
    cache = KVCache(a, 1, config.block_size, dtype, decoder.device, states)
    runners.expected_pages = pages = num_pages(num_positions, config.block_size)
    return [*runners.variants(cache, sampling, pages), *_writing(cache, decoder)]


def _writing(cache: KVCache, decoder: Decoder) -> list[KernelVariant]:
    a, like = decoder.architecture, {"dtype": decoder.compute, "device": decoder.device}
    slots_T = torch.zeros(1, dtype=torch.int64, device=decoder.device)
    with dry_run() as variants:
        for layer in a.layers_with("attention"):
            heads = a.kv_heads(a.kind(layer))
            x_TKH = torch.empty(1, heads.num, heads.size, **like)
            cache.of_layer(layer).write(layer, slots_T, x_TKH, x_TKH)
    return list(variants)
