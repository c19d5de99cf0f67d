"""Mistral; Ministral, of which some layers see a window; Ministral 3, whose queries grow with the position.

The window of the first Mistral caps the positions instead, so that it never takes effect: that of the others
is computed.
"""

import dataclasses

from qerl.errors import UserError
from qerl.models.architecture import Architecture
from qerl.models.families.dense import all_kinds, dense, read_layer_kinds, read_window
from qerl.models.families.reader import ConfigReader
from qerl.models.families.rope_settings import read_rope, rope_section

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral(config: ConfigReader) -> Architecture:
    positions = config.count("max_position_embeddings")
    positions = min(positions, config.count("sliding_window", positions))
    return dense(config, "MistralForCausalLM", max_positions=positions)


def ministral(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=131_072, sliding_window=4096, num_key_value_heads=8)
    has_windows = config.get("sliding_window") is not None
    kinds = read_layer_kinds(config, lambda index: has_windows)
    return dense(config, "MinistralForCausalLM", layer_kinds=kinds)


def ministral3(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=262_144, head_dim=128, num_key_value_heads=8)
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = ConfigReader(config.entries | {"rope_parameters": _MINISTRAL3_ROPE})
    window = None if config.get("sliding_window") is None else read_window(config)
    kinds = () if window is None else all_kinds(config, window=window)
    if rope_section(config).get("llama_4_scaling_beta") is None:
        raise UserError("rope_parameters needs llama_4_scaling_beta in the model's config; 0 is none")
    growth = rope_section(config).optional_number("llama_4_scaling_beta") or 0.0
    rope = dataclasses.replace(read_rope(config), query_growth=growth)
    return dense(config, "Ministral3ForCausalLM", eps=1e-5, rope=rope, layer_kinds=kinds)
