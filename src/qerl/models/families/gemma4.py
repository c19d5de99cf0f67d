"""Gemma 4, dense: layers without a window have heads of another size and a rope of their own, and may have no
v_proj: their values are the keys, normed in another way. Norms multiply by their weight, unlike Gemma 3's.
Not described here: per-layer embeddings, layers that share keys and values, experts beside the MLP.
"""

import dataclasses
import math

from qerl.errors import UserError
from qerl.models.architecture import Architecture, LayerKind, Rope
from qerl.models.families.dense import all_kinds, attention_biases, dense, read_layer_kinds
from qerl.models.families.gemma import ACTIVATIONS, NORMS
from qerl.models.families.reader import ConfigReader, NotDescribedError, short_text
from qerl.models.families.rope_settings import read_rope, rope_section

_DEFAULTS = {  # of transformers, whose config.json leaves them out
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_144,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
}
_PARTS = {
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "layers that share keys and values",
    "enable_moe_block": "experts beside its MLP",
}
_GLOBAL_HEAD_SIZE = 512
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4(config: ConfigReader) -> Architecture:
    config = _with_ropes(config.filled(**_DEFAULTS))
    for name, part in _PARTS.items():
        if config.get(name):
            raise NotDescribedError(f"this model has {part} ({name}): set model.backend to transformers")
    if (seen := config.get("use_bidirectional_attention")) not in (None, "vision"):  # images: not computed
        raise UserError(f"use_bidirectional_attention must be vision, got {short_text(seen)}")
    kinds = read_layer_kinds(config, lambda index: (index + 1) % 6 != 0, has_local_rope=True)
    kinds = kinds or all_kinds(config)
    whole = _whole(config, kinds)
    return dense(
        config,
        "Gemma4ForCausalLM",
        layer_kinds=tuple(whole if kind.rope == "main" else kind for kind in kinds),
        rope=_global_rope(config, whole),
        local_rope=read_rope(config, rope_section(config, "sliding_attention")),
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        norms=NORMS,
        qk_norm=True,
        value_norm=True,
        layer_scalar=True,
        attention_scale=1.0,
        embedding_scale=math.sqrt(config.count("hidden_size")),
        logit_softcap=config.optional_number("final_logit_softcapping"),
        **attention_biases(config),
    )


def _with_ropes(config: ConfigReader) -> ConfigReader:
    """Return the config with rotary settings of both types of layers; transformers reads no rope_scaling."""
    if config.get("rope_scaling"):
        raise UserError("rope_scaling is not read in Gemma 4: use rope_parameters")
    ropes = config.section("rope_parameters").entries or _ROPES
    for kind in _ROPES:
        theta = ConfigReader(ropes).section(kind).get("rope_theta") or config.get("rope_theta")
        if theta is None:
            raise UserError(f"rope_parameters needs a rope_theta of {kind} in the model's config")
    return ConfigReader(config.entries | {"rope_parameters": ropes})


def _whole(config: ConfigReader, kinds: tuple[LayerKind, ...]) -> LayerKind:
    """Return the kind of the layers without a window. transformers 5 writes what differs layer by layer, of
    layer 5 of 12 under "05"."""
    shares, by_layer = config.flag("attention_k_eq_v"), config.section("per_layer_config")
    by_layer = ConfigReader({name.lstrip("0") or "0": value for name, value in by_layer.entries.items()})
    num_kv_heads = config.get("num_global_key_value_heads") if shares else None
    entries = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": num_kv_heads}
    if by_layer.entries:
        wholes = [str(index) for index, kind in enumerate(kinds) if kind.rope == "main"]
        each = [by_layer.section(index).entries for index in wholes]
        if set(by_layer.entries) - set(wholes) or any(one != each[0] for one in each):
            text = short_text(by_layer.entries)
            raise UserError(f"per_layer_config must be that of all layers without a window, got {text}")
        entries = {"head_dim": config.get("head_dim")} | each[0]
    reader = ConfigReader(entries)
    num_kv_heads = reader.count("num_key_value_heads", config.count("num_key_value_heads"))
    if config.count("num_attention_heads") % num_kv_heads:
        raise UserError(f"num_attention_heads must be a multiple of {num_kv_heads} global key/value heads")
    size = reader.count("head_dim", _GLOBAL_HEAD_SIZE)
    if size % 2:
        raise UserError(f"global_head_dim must be even because RoPE rotates pairs, got {size}")
    return LayerKind(head_size=size, num_kv_heads=num_kv_heads, has_values=not shares)


def _global_rope(config: ConfigReader, whole: LayerKind) -> Rope:
    """Return the rope of the layers without a window, which may turn the first pairs of a head only."""
    settings = rope_section(config, "full_attention")
    if settings.get("rope_type") != "proportional":
        return read_rope(config, settings)
    plain = read_rope(config, ConfigReader(settings.entries | {"rope_type": "default"}))
    turned = int(settings.number("partial_rotary_factor", 1.0) * (whole.head_size or 0) // 2)
    return dataclasses.replace(plain, kind="proportional", num_turned=turned)
