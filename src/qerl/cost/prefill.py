"""The tokens of one forward pass of a prefill.

The host launches a layer in about 2.5 ms, whatever its size, while the device takes 2.4 us a token for all
layers of Qwen2.5-0.5B, 5.8 of 1.5B and 26 of 7B (H200). So passes over small layers have more tokens, where
their activations take at most 1/32 of the GPU's memory:

    tokens = 4,096 * 4e8 / (weights of the largest layer), rounded down to a power of two, 4,096 to 32,768

With these the device works about 1.6 times as long as the host.
"""

from qerl.config import EngineConfig
from qerl.cost.activations import expert_pass_bytes
from qerl.kernels.runtime.gpu_memory import largest_doubling
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import counted_specs

_TOKENS, _MAX_TOKENS, _MIXTURE_TOKENS = 4096, 32_768, 16_384
_LAYER_WEIGHTS = 4e8
_MEMORY_SHARE = 32


def batched_tokens(config: EngineConfig, a: Architecture, memory_bytes: float = 0) -> int:
    """Return engine.max_num_batched_tokens, resolved. memory_bytes: of the GPU; 0 on a CPU."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if a.mixture is not None:
        return _MIXTURE_TOKENS
    weights = max(sum(x.num_weights for g in spec.groups for x in g.linears) for spec, _ in counted_specs(a))
    limit = min(_MAX_TOKENS, _TOKENS * _LAYER_WEIGHTS / weights)
    return largest_doubling(_TOKENS, min(limit, memory_bytes / _MEMORY_SHARE / prefill_row_bytes(a)))


def min_prefill_tokens(config: EngineConfig, a: Architecture, memory_bytes: float = 0) -> int:
    """Return the tokens from which a pass is worth its launches: half of those of a model without experts."""
    return _TOKENS // 2 if a.mixture is not None else batched_tokens(config, a, memory_bytes) // 2


def prefill_row_bytes(a: Architecture) -> int:
    """Return the bytes of a token's activations in a pass: a layer's, also recurrent ones and experts'."""
    heads = max((a.num_heads + 2 * kv.num) * kv.size for kv in a.each_kv_heads)
    row = 2 * (4 * a.ff_width + 10 * a.width + 2 * heads)
    return row + (0 if a.delta is None else a.delta.working_bytes) + expert_pass_bytes(a, 2)
