"""Qwen 2 and 2.5, with biases of q, k and v; Qwen 3, with norms of queries and keys. The hybrids are in
qwen_hybrid.py, the mixtures in qwen_moe.py.

A sliding window caps the positions instead, so that it never takes effect: no published model uses one.
"""

from qerl.models.architecture import Architecture
from qerl.models.families.dense import attention_biases, dense
from qerl.models.families.reader import ConfigReader


def qwen2(config: ConfigReader) -> Architecture:
    return dense(config, "Qwen2ForCausalLM", qkv_bias=True, max_positions=max_positions(config))


def qwen3(config: ConfigReader) -> Architecture:
    parts = {"qk_norm": True, "max_positions": max_positions(config)}
    return dense(config, "Qwen3ForCausalLM", **attention_biases(config), **parts)


def max_positions(config: ConfigReader) -> int:
    """Return the positions, capped by a window."""
    positions = config.count("max_position_embeddings")
    if not config.flag("use_sliding_window"):
        return positions
    return min(positions, config.count("sliding_window", positions))
