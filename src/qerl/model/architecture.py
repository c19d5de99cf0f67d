"""What a checkpoint's config.json says about the decoder, checked and in our words.

    Architecture.family      bias of q|k|v   bias of o         bias of the MLP   q/k norm
    LlamaForCausalLM         attention_bias  attention_bias    mlp_bias          no
    MistralForCausalLM       no              no                no                no
    Qwen2ForCausalLM         yes             no                no                no
    Qwen3ForCausalLM         attention_bias  attention_bias    no                yes

Both spellings of the rotary settings are read: `rope_parameters` (transformers 5), and `rope_theta` with
`rope_scaling` (4). A sliding window is not computed: it caps the positions instead, so that it never acts.
"""

import dataclasses
from typing import Any

from qerl.errors import UserError

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """How positions turn the heads. Only the settings of its kind mean anything; rope.py has the formulas."""

    kind: str
    theta: float
    factor: float = 1.0
    original_positions: int = 0
    """llama3, yarn: the longest sequence before the frequencies were stretched."""
    low_frequency: float = 1.0
    """llama3: wavelengths over original_positions / low_frequency are stretched whole."""
    high_frequency: float = 4.0
    """llama3: those under original_positions / high_frequency not at all."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn this often within original_positions are not stretched."""
    beta_slow: float = 1.0
    """yarn: those that turn less often than this are stretched whole."""
    is_truncated: bool = True
    """yarn: the two limits are rounded outwards to whole dimensions."""
    magnitude: float | None = None
    """yarn: what cosine and sine are multiplied by; None derives it from the factor."""
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
    """From the contents of config.json."""
    family = _family(config)
    biased = family in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(config.get("attention_bias"))
    width, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % kv_heads:
        raise UserError(
            f"num_attention_heads must be a multiple of num_key_value_heads, got {num_heads} and {kv_heads}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act must be silu, got {config['hidden_act']!r}")
    return Architecture(
        family=family,
        num_layers=_positive(config, "num_hidden_layers"),
        width=width,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_size=config.get("head_dim") or width // num_heads,
        ff_width=_positive(config, "intermediate_size"),
        vocab_size=_positive(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        max_positions=_max_positions(config, family),
        qkv_bias=biased or family == "Qwen2ForCausalLM",
        output_bias=biased,
        mlp_bias=family == "LlamaForCausalLM" and bool(config.get("mlp_bias")),
        qk_norm=family == "Qwen3ForCausalLM",
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _family(config: dict[str, Any]) -> str:
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in FAMILIES:
        name = ", ".join(named) or "(none named)"
        raise UserError(f"architecture {name} is not supported; supported: {', '.join(FAMILIES)}")
    return named[0]


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise UserError(f"{name} must be a positive integer in the model's config, got {value!r}")
    return value


def _max_positions(config: dict[str, Any], family: str) -> int:
    positions, window = _positive(config, "max_position_embeddings"), config.get("sliding_window")
    is_windowed = family == "MistralForCausalLM" or config.get("use_sliding_window")
    return min(positions, window) if window and is_windowed else positions


def _rope(config: dict[str, Any]) -> Rope:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UserError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UserError(f"partial_rotary_factor must be 1, got {partial}")
    if kind != "default" and "factor" not in settings:
        raise UserError(f"rope type {kind!r} needs a factor in the model's config")
    original = config.get("original_max_position_embeddings") or settings.get(
        "original_max_position_embeddings"
    )
    return Rope(
        kind=kind,
        theta=float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        factor=float(settings.get("factor") or 1.0),
        original_positions=original or _positive(config, "max_position_embeddings"),
        low_frequency=float(settings.get("low_freq_factor") or 1.0),
        high_frequency=float(settings.get("high_freq_factor") or 4.0),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        is_truncated=bool(settings.get("truncate", True)),
        magnitude=settings.get("attention_factor"),
        mscale=settings.get("mscale"),
        mscale_all_dim=settings.get("mscale_all_dim"),
    )
