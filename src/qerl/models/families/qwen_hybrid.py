"""Qwen3.5 and 3.6 (Qwen3_5ForCausalLM) and Qwen3-Next without experts: layers with Gated DeltaNet, and every
fourth with gated attention, of which a quarter of each head is rotated. Norms multiply by 1 + weight."""

from typing import Any

from qerl.errors import UserError
from qerl.kernels.delta_net.gated_delta_net import DeltaShape
from qerl.models.architecture import Architecture, LayerKind
from qerl.models.families.dense import attention_biases, dense, read_head_size, read_num_layers
from qerl.models.families.reader import ConfigReader, NotDescribedError, check_multiple, short_text
from qerl.models.families.rope_settings import read_rotary_size

_KINDS = {"full_attention": LayerKind(), "linear_attention": LayerKind(mixer="delta")}
_DEFAULTS = {  # of transformers, whose config.json leaves them out
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def qwen3_5(config: ConfigReader) -> Architecture:
    return _hybrid(config.filled(**_DEFAULTS), "Qwen3_5ForCausalLM")


def qwen3_next(config: ConfigReader) -> Architecture:
    if config.get("num_experts") != 0:
        raise NotDescribedError(
            f"num_experts must be 0, got {short_text(config.get('num_experts'))}:"
            " our decoder runs the dense models of Qwen3-Next; model.backend transformers runs the others"
        )
    return _hybrid(config.filled(**_DEFAULTS), "Qwen3NextForCausalLM", delta_projections="by_head")


def _hybrid(config: ConfigReader, family: str, **parts: Any) -> Architecture:
    kinds = _layer_kinds(config)
    has_delta = any(kind.mixer == "delta" for kind in kinds)
    return dense(
        config,
        family,
        rotary_size=read_rotary_size(config, read_head_size(config), default=0.25),
        layer_kinds=kinds,
        qk_norm=True,
        norm_offset=1.0,
        attention_gate=True,
        delta=_delta_shape(config) if has_delta else None,
        **attention_biases(config),
        **parts,
    )


def _layer_kinds(config: ConfigReader) -> tuple[LayerKind, ...]:
    num_layers, every = read_num_layers(config), config.count("full_attention_interval", 4)
    if config.get("layer_types") is None:
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    else:
        types = config.listed("layer_types", num_layers)
    if odd := [each for each in types if not isinstance(each, str) or each not in _KINDS]:
        raise UserError(f"layer_types must be {' or '.join(_KINDS)}, got {short_text(odd[0])}")
    if "full_attention" not in types:
        raise UserError("layer_types must have a full_attention layer in the model's config")
    return tuple(_KINDS[each] for each in types)


def _delta_shape(config: ConfigReader) -> DeltaShape:
    shape = DeltaShape(
        num_key_heads=config.count("linear_num_key_heads"),
        num_value_heads=config.count("linear_num_value_heads"),
        key_size=config.count("linear_key_head_dim"),
        value_size=config.count("linear_value_head_dim"),
        num_taps=config.count("linear_conv_kernel_dim"),
    )
    num_heads = shape.num_value_heads, shape.num_key_heads
    check_multiple("linear_num_value_heads", num_heads[0], "linear_num_key_heads", num_heads[1])
    return shape
