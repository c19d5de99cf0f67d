"""Read the entries that the configs of all dense decoders have."""

from collections.abc import Callable
from typing import Any

from qerl.errors import UserError
from qerl.models.architecture import Architecture, LayerKind
from qerl.models.families.reader import ConfigReader, check_multiple, short_text
from qerl.models.families.rope_settings import read_rope, rope_section

_MAX_LAYERS = 1 << 16
_HAS_WINDOW = {"full_attention": False, "sliding_attention": True}


def dense(config: ConfigReader, family: str, *, eps: float = 1e-6, **parts: Any) -> Architecture:
    """Return a decoder as Llama's, with some parts replaced. eps: the family's default."""
    width, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", num_heads)
    check_multiple("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    if "activation" not in parts:
        config.having(hidden_act="silu")
    if "rotary_size" not in parts:
        for place in (config, *_rope_sections(config, parts)):
            place.having(partial_rotary_factor=1)
    if "rope" not in parts:
        parts["rope"] = read_rope(config)
    fields: dict[str, Any] = {
        "family": family,
        "num_layers": read_num_layers(config),
        "width": width,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": read_head_size(config),
        "ff_width": config.count("intermediate_size"),
        "vocab_size": config.count("vocab_size"),
        "norm_eps": config.number("rms_norm_eps", eps),
        "max_positions": config.count("max_position_embeddings"),
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tied_head": config.flag("tie_word_embeddings"),
    }
    return Architecture(**fields | parts)


def _rope_sections(config: ConfigReader, parts: dict[str, Any]) -> list[ConfigReader]:
    """Return the rotary settings that may rotate a part of each head, which the caller has not read."""
    if "local_rope" not in parts:
        return [rope_section(config)]
    is_partial = parts["rope"].kind == "proportional"
    return [
        rope_section(config, f"{kind}_attention") for kind in ("sliding", "full")[: 1 if is_partial else 2]
    ]


def attention_biases(config: ConfigReader) -> dict[str, bool]:
    """Return the parts of `dense` that `attention_bias` switches on."""
    return dict.fromkeys(("qkv_bias", "output_bias"), config.flag("attention_bias"))


def all_kinds(config: ConfigReader, **parts: Any) -> tuple[LayerKind, ...]:
    """Return the kinds of layers that are all alike."""
    return (LayerKind(**parts),) * read_num_layers(config)


def read_num_layers(config: ConfigReader) -> int:
    return config.count("num_hidden_layers", at_most=_MAX_LAYERS)


def read_head_size(config: ConfigReader) -> int:
    width, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    if config.get("head_dim") is None:
        check_multiple("hidden_size", width, "num_attention_heads", num_heads)
    head_size = config.count("head_dim", width // num_heads)
    if head_size % 2:
        raise UserError(f"head_dim must be even because RoPE rotates pairs, got {head_size}")
    return head_size


def read_layer_kinds(
    config: ConfigReader, has_window: Callable[[int], bool], *, has_local_rope: bool = False
) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of which some see a window of `sliding_window` positions: those that
    `layer_types` lists, or else those whose index `has_window` is true of. has_local_rope: their rope is
    Architecture.local_rope."""
    num_layers = read_num_layers(config)
    windowed = [has_window(index) for index in range(num_layers)]
    if config.get("layer_types") is not None:
        types = config.listed("layer_types", num_layers)
        if odd := [each for each in types if not isinstance(each, str) or each not in _HAS_WINDOW]:
            supported = " or ".join(_HAS_WINDOW)
            raise UserError(f"layer_types must be {supported}, got {short_text(odd[0])}")
        windowed = [_HAS_WINDOW[each] for each in types]
    if not any(windowed):
        return ()
    local = LayerKind(window=read_window(config), rope="local" if has_local_rope else "main")
    kinds = tuple(local if is_windowed else LayerKind() for is_windowed in windowed)
    return kinds if local != LayerKind() else ()


def read_window(config: ConfigReader) -> int | None:
    """Return `sliding_window`; None if it never takes effect."""
    window = config.count("sliding_window")
    return None if window >= config.count("max_position_embeddings") else window
