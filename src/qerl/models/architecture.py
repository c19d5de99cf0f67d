"""Parse and check a checkpoint's config.json into an Architecture.

    Architecture.family      bias of q|k|v   bias of o         bias of the MLP   q/k norm
    LlamaForCausalLM         attention_bias  attention_bias    mlp_bias          no
    MistralForCausalLM       no              no                no                no
    Qwen2ForCausalLM         yes             no                no                no
    Qwen3ForCausalLM         attention_bias  attention_bias    no                yes

Both spellings of the rotary settings are read: `rope_parameters` (transformers 5), and `rope_theta` with
`rope_scaling` (transformers 4). Sliding-window attention is not implemented: the window caps the positions
instead, so that it never takes effect.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from qerl.errors import UserError

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_MAX_COUNT, _MAX_NUMBER = 1 << 31, 1e12
_MAX_SHOWN_CHARS = 80


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Settings of the rotary position embedding. Each kind uses some of them (rope.py)."""

    kind: str
    theta: float
    factor: float = 1.0
    original_positions: int = 0
    """llama3, yarn: the maximum length before the frequencies were scaled."""
    low_frequency: float = 1.0
    """llama3: wavelengths over original_positions / low_frequency are scaled by the whole factor."""
    high_frequency: float = 4.0
    """llama3: wavelengths under original_positions / high_frequency are not scaled."""
    beta_fast: float = 32.0
    """yarn: dimensions with at least this many turns within original_positions are not scaled."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer turns than this are scaled by the whole factor."""
    is_truncated: bool = True
    """yarn: round the two limits outwards to whole dimensions."""
    magnitude: float | None = None
    """yarn: factor of cosine and sine; None derives it from `factor`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The shape of a decoder; `from_hf_config(json)` makes it."""

    family: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ff_width: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool


def from_hf_config(config: dict[str, Any]) -> Architecture:
    """Parse the contents of config.json; raise UserError if anything in it is wrong or unsupported."""
    family = _family(config)
    biased = family in ("LlamaForCausalLM", "Qwen3ForCausalLM") and _flag(config, "attention_bias")
    width, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", num_heads)
    if num_heads % kv_heads:
        raise UserError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {num_heads} and {kv_heads}"
        )
    head_size = _head_size(config, width, num_heads)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"hidden_act must be silu, got {_short_text(activation)}")
    return Architecture(
        family=family,
        num_layers=_count(config, "num_hidden_layers"),
        width=width,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        ff_width=_count(config, "intermediate_size"),
        vocab_size=_count(config, "vocab_size"),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_rope(config),
        max_positions=_max_positions(config, family),
        qkv_bias=biased or family == "Qwen2ForCausalLM",
        output_bias=biased,
        mlp_bias=family == "LlamaForCausalLM" and _flag(config, "mlp_bias"),
        qk_norm=family == "Qwen3ForCausalLM",
        tied_head=_flag(config, "tie_word_embeddings"),
    )


def _head_size(config: dict[str, Any], width: int, num_heads: int) -> int:
    if config.get("head_dim") is None and width % num_heads:
        raise UserError(f"hidden_size must be a multiple of num_attention_heads, got {width} and {num_heads}")
    head_size = _count(config, "head_dim", width // num_heads)
    if head_size % 2:
        raise UserError(f"head_dim must be even because RoPE rotates pairs, got {head_size}")
    return head_size


def _family(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"architectures must be a list of names, got {_short_text(names)}")
    if len(names) != 1 or names[0] not in FAMILIES:
        name = _short_text(", ".join(names), str) or "(none named)"
        raise UserError(f"architecture {name} is not supported; supported: {', '.join(FAMILIES)}")
    return names[0]


def _short_text(value: Any, form: Callable[[Any], str] = repr) -> str:
    """Format the value on one line, cut to 80 characters."""
    text = " ".join(form(value).split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _count(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a positive integer; null or a missing entry gives the default."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UserError(f"{name} must be a positive integer in the model's config, got {_short_text(value)}")
    if value > _MAX_COUNT:
        raise UserError(
            f"{name} must be at most {_MAX_COUNT:,} in the model's config, got {_short_text(value)}"
        )
    return value


def _number(settings: dict[str, Any], name: str, default: float) -> float:
    """Return a positive finite number; null or a missing entry gives the default."""
    value = settings.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_NUMBER:
        raise UserError(f"{name} must be a positive number in the model's config, got {_short_text(value)}")
    return float(value)


def _flag(settings: dict[str, Any], name: str, default: bool = False) -> bool:
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{name} must be true or false in the model's config, got {_short_text(value)}")
    return value


def _max_positions(config: dict[str, Any], family: str) -> int:
    positions = _count(config, "max_position_embeddings")
    is_windowed = _flag(config, "use_sliding_window") or family == "MistralForCausalLM"
    return min(positions, _count(config, "sliding_window", positions)) if is_windowed else positions


def _rope(config: dict[str, Any]) -> Rope:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise UserError(
            f"rope_parameters must be an object in the model's config, got {_short_text(settings)}"
        )
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UserError(f"rope type {_short_text(kind)} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise UserError(f"partial_rotary_factor must be 1, got {_short_text(partial)}")
    if kind != "default" and settings.get("factor") is None:
        raise UserError(f"rope type {kind!r} needs a factor in the model's config")
    _check_order(settings, kind)
    original = _count(config, "max_position_embeddings")
    for place in (settings, config):
        original = _count(place, "original_max_position_embeddings", original)
    return Rope(
        kind=kind,
        theta=_number(settings, "rope_theta", _number(config, "rope_theta", 10_000.0)),
        factor=_number(settings, "factor", 1.0),
        original_positions=original,
        low_frequency=_number(settings, "low_freq_factor", 1.0),
        high_frequency=_number(settings, "high_freq_factor", 4.0),
        beta_fast=_number(settings, "beta_fast", 32.0),
        beta_slow=_number(settings, "beta_slow", 1.0),
        is_truncated=_flag(settings, "truncate", True),
        magnitude=_optional(settings, "attention_factor"),
        mscale=_optional(settings, "mscale"),
        mscale_all_dim=_optional(settings, "mscale_all_dim"),
    )


def _check_order(settings: dict[str, Any], kind: str) -> None:
    """Raise UserError for equal limits: the ramp between them would divide by zero."""
    limits = {"llama3": ("low_freq_factor", 1.0, "high_freq_factor", 4.0)}
    limits["yarn"] = ("beta_slow", 1.0, "beta_fast", 32.0)
    if kind in limits:
        low, low_default, high, high_default = limits[kind]
        if _number(settings, low, low_default) >= _number(settings, high, high_default):
            raise UserError(f"{low} must be less than {high} in the model's config")


def _optional(settings: dict[str, Any], name: str) -> float | None:
    """Return a positive number; None if the entry is missing, null or 0."""
    return None if settings.get(name) in (None, 0) else _number(settings, name, 1.0)
