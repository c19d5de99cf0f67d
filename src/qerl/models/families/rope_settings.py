"""Read the rotary settings of a config as transformers 5 does: `rope_parameters`, of each type of layer or of
all, with `rope_theta` in it, and `rope_scaling`, the field of transformers 4, with `rope_theta` beside it.

A config that has both, such as one that transformers 5 wrote and to which rope_scaling was added by hand, has
rope_scaling alone; its rope_theta is then the one beside it, or the family's default. Where types of layers
differ, rope_scaling changes entries of the layers with full attention.
"""

from qerl.errors import UserError
from qerl.models.architecture import Rope
from qerl.models.families.reader import ConfigReader, positive, short_text

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def rope_section(config: ConfigReader, layer_type: str | None = None) -> ConfigReader:
    """Return the entries of the rotary settings; layer_type: those of these layers, where types differ."""
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    if layer_type is None:
        return _flat(old) if old.entries else _flat(new)
    settings = new.section(layer_type).entries or {"rope_type": "default"}
    if layer_type == "full_attention":
        settings = settings | _flat(old).entries
    config.having(original_max_position_embeddings=None)  # transformers ignores both here
    return ConfigReader(settings).having(truncate=True)


def _flat(settings: ConfigReader) -> ConfigReader:
    """Return the settings; raise UserError if they are those of types of layers."""
    if nested := [name for name, value in settings.entries.items() if isinstance(value, dict)]:
        raise UserError(
            f"rope settings of {short_text(nested[0], str)} are not supported: all layers have one"
        )
    return settings


def read_rope(
    config: ConfigReader,
    settings: ConfigReader | None = None,
    *,
    kinds: tuple[str, ...] = ROPE_KINDS[:-1],
    theta: float = 10_000.0,
    rotary_size: int = 0,
) -> Rope:
    """Return the settings. theta: the family's default; rotary_size: of longrope."""
    settings = rope_section(config) if settings is None else settings
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in kinds:
        raise UserError(f"rope type {short_text(kind)} is not supported; supported: {', '.join(kinds)}")
    if kind == "dynamic" and _factor(settings, kind):
        kind = "default"  # of which it differs beyond max_position_embeddings, which caps the positions
    _check_order(settings, kind)
    positions = original = config.count("max_position_embeddings")
    for place in (settings, config):
        original = place.count("original_max_position_embeddings", original)
    if kind not in ("default", "longrope") and not (kind == "yarn" and "factor" in settings.entries):
        _factor(settings, kind)
    ratio = positions / original if kind in ("longrope", "yarn") else 1.0
    return Rope(
        kind=kind,
        theta=settings.number("rope_theta", config.number("rope_theta", theta)),
        factor=settings.number("factor", ratio),
        original_positions=original,
        low_frequency=settings.number("low_freq_factor", 1.0),
        high_frequency=settings.number("high_freq_factor", 4.0),
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        is_truncated=settings.flag("truncate", True),
        magnitude=settings.number("attention_factor", 0.0) or None,
        mscale=settings.optional_number("mscale"),
        mscale_all_dim=settings.optional_number("mscale_all_dim"),
        divisors=_divisors(settings, rotary_size) if kind == "longrope" else (),
    )


def read_rotary_size(config: ConfigReader, head_size: int, default: float = 1.0) -> int:
    """Return how many elements of a head are rotated."""
    part = config.number("partial_rotary_factor", default)
    part = rope_section(config).number("partial_rotary_factor", part)
    size = int(head_size * part)
    if not 0 < size <= head_size or size % 2:
        even_part = f"an even part of the {head_size} of head_dim"
        raise UserError(f"partial_rotary_factor {part:g} must give {even_part}")
    return size


def _factor(settings: ConfigReader, kind: str) -> float:
    if settings.get("factor") is None:
        raise UserError(f"rope type {kind!r} needs a factor in the model's config")
    return settings.number("factor", 1.0)


def _divisors(settings: ConfigReader, rotary_size: int) -> tuple[float, ...]:
    """Return those of sequences within the original length."""
    settings.listed("long_factor", rotary_size // 2)
    values = settings.listed("short_factor", rotary_size // 2)
    return tuple(positive("short_factor", value) for value in values)


def _check_order(settings: ConfigReader, kind: str) -> None:
    """Raise UserError for equal limits: the ramp between them would divide by zero."""
    limits = {"llama3": ("low_freq_factor", "high_freq_factor", 4), "yarn": ("beta_slow", "beta_fast", 32)}
    if kind in limits:
        low, high, high_default = limits[kind]
        if kind == "llama3" and None in (settings.get(low), settings.get(high)):
            raise UserError(f"rope type 'llama3' needs {low} and {high} in the model's config")
        if settings.number(low, 1.0) >= settings.number(high, high_default):
            raise UserError(f"{low} must be less than {high} in the model's config")
