"""The tokens of one forward pass of a prefill.

The host launches a layer in about 2.5 ms, whatever its size, while the device takes 2.4 us a token for all
layers of Qwen2.5-0.5B, 5.8 of 1.5B and 26 of 7B (H200). So passes over small layers have more tokens:

    tokens = 4,096 * 4e8 / (weights of the largest layer), rounded down to a power of two, 4,096 to 32,768

With these the device works about 1.6 times as long as the host.
"""

from qerl.config import EngineConfig
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import counted_specs

_TOKENS, _MAX_TOKENS, _MIXTURE_TOKENS = 4096, 32_768, 16_384
_LAYER_WEIGHTS = 4e8


def batched_tokens(config: EngineConfig, a: Architecture, *, on_gpu: bool) -> int:
    """Return engine.max_num_batched_tokens, resolved."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if a.mixture is not None:
        return _MIXTURE_TOKENS
    tokens = _TOKENS
    while on_gpu and 2 * tokens <= min(_MAX_TOKENS, _TOKENS * _LAYER_WEIGHTS / _layer_weights(a)):
        tokens *= 2
    return tokens


def min_prefill_tokens(config: EngineConfig, a: Architecture, *, on_gpu: bool) -> int:
    """Return the tokens from which a pass is worth its launches: half of those of a model without experts."""
    return _TOKENS // 2 if a.mixture is not None else batched_tokens(config, a, on_gpu=on_gpu) // 2


def _layer_weights(a: Architecture) -> int:
    return max(
        sum(x.num_weights for group in spec.groups for x in group.linears) for spec, _ in counted_specs(a)
    )
