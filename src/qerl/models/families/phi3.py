"""Phi 3, 3.5 and 4: q, k, v and gate, up are stored as one tensor each.

longrope has other frequencies for sequences that are longer than the original length. A sequence whose length
is not known beforehand can have one of the two only, so the original length caps the positions.
"""

from qerl.errors import UserError
from qerl.models.architecture import Architecture, StoredLinear
from qerl.models.families.dense import all_kinds, dense, read_head_size, read_window
from qerl.models.families.reader import ConfigReader
from qerl.models.families.rope_settings import read_rope, read_rotary_size, rope_section

_LONGROPE = "longrope", "su", "yarn"  # older configs have the other names
_QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_STORED = (
    StoredLinear(name="self_attn.qkv_proj", holds=_QKV),
    StoredLinear(name="mlp.gate_up_proj", holds=("mlp.gate_proj", "mlp.up_proj")),
)


def phi3(config: ConfigReader) -> Architecture:
    config = config.filled(max_position_embeddings=4096, original_max_position_embeddings=4096)
    settings, positions = rope_section(config), config.count("max_position_embeddings")
    if (settings.get("rope_type") or settings.get("type")) in _LONGROPE:
        settings = ConfigReader(settings.entries | {"rope_type": "longrope"})
    rotary_size = read_rotary_size(config, read_head_size(config))
    rope = read_rope(config, settings, kinds=("default", "longrope"), rotary_size=rotary_size)
    if rope.kind == "longrope":
        if rope.original_positions < 2:
            raise UserError("original_max_position_embeddings must be at least 2 with longrope")
        positions = min(positions, rope.original_positions)
    capped = ConfigReader(config.entries | {"max_position_embeddings": positions})
    window = None if config.get("sliding_window") is None else read_window(capped)
    parts = {"max_positions": positions, "stored_linears": _STORED}
    if window is not None:
        parts["layer_kinds"] = all_kinds(config, window=window)
    return dense(config, "Phi3ForCausalLM", eps=1e-5, rope=rope, rotary_size=rotary_size, **parts)
