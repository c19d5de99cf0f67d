"""List the kernels of a run's decode steps from the model's config.json, before any weight is read."""

import torch

from qerl.config import EngineConfig
from qerl.engine.kv_cache import FP8, KVCache
from qerl.engine.runner_cache import RunnerCache
from qerl.engine.scheduler import num_pages
from qerl.engine.state_cache import StateCache
from qerl.kernels.nvrtc import KernelVariant
from qerl.models.decoder import Decoder
from qerl.models.device import Kernels
from qerl.types import Sampling


@torch.no_grad()
def planned_kernels(
    decoder: Decoder, config: EngineConfig, sampling: Sampling, kernels: Kernels, *, num_positions: int
) -> list[KernelVariant]:
    """Return the kernels that an engine would compile before its first step, in the order of their launches.

    decoder: without memory (models/outline.py); kernels: those chosen for the GPU; num_positions: of the
    longest sequence that is expected. None are listed where PyTorch's operations are used.
    """
    runners, a = RunnerCache(decoder, config, frozenset((0,)), kernels), decoder.architecture
    states = None if a.delta is None else StateCache(a, 1, decoder.compute, decoder.device)
    dtype = FP8 if config.kv_cache_dtype == "fp8" else decoder.compute
    cache = KVCache(a, 1, config.block_size, dtype, decoder.device, states)
    runners.expected_pages = pages = num_pages(num_positions, config.block_size)
    return runners.variants(cache, sampling, pages)
