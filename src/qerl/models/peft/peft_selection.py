"""Select the linears that PEFT's target_modules, exclude_modules, layers_to_transform and patterns select.

    a list    a linear whose name is an entry, or ends in a dot and an entry
    a string  a regular expression of the whole name; "all-linear" is each linear

An AdapterConfig has one rank, one scaling and the same linears in each layer where that is so, and else full
names and patterns. Where the decoder splits a linear that transformers has as one, both names select
(StoredLinear).
"""

import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.models.architecture import Architecture
from qerl.models.layer_spec import layer_specs

ALL_LINEAR = "all-linear"
_PLAIN_NAME = re.compile(r"[\w.]+")


class Module(NamedTuple):
    """Module(("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj"), "q_proj", 0)"""

    names: tuple[str, ...]
    """Names of the linear in transformers and, if it is another one, in the decoder."""
    part: str
    """Last part of its name in the decoder, as adapter.target_modules has it."""
    layer: int | None


class LinearAdapter(NamedTuple):
    """LinearAdapter(rank=32, alpha=32.0)"""

    rank: int
    alpha: float


class Selection(NamedTuple):
    modules: list[Module]
    notices: list[str]
    """Lines about entries that select nothing, which PEFT does not report."""


def modules_of(a: Architecture) -> tuple[list[Module], list[str]]:
    """Return the linears that may have an adapter, and the names of other modules that PEFT could adapt."""
    prefix = "model." if a.part_of is None else "model.language_model."
    stored_as = {part: stored.name for stored in a.stored_linears for part in stored.holds}
    modules, others = [], ["lm_head", f"{prefix}embed_tokens"]
    for layer, spec in enumerate(layer_specs(a)):
        at = f"{prefix}layers.{layer}."
        others += [f"{at}linear_attn.conv1d"] * (spec.kind.mixer == "delta")
        for linear in spec.linears:
            stored = stored_as.get(linear.name, linear.name)
            names = tuple(dict.fromkeys((at + stored, at + linear.name)))
            if linear.short_name == "router":
                others += names
            else:
                modules.append(Module(names, linear.short_name, layer))
    return modules, others


def linear_names(a: Architecture | None, name: str) -> tuple[str, ...]:
    """Return the full names of a linear: of transformers, which may store it with others, and the decoder's.
    name: "layers.0.self_attn.q_proj"; without an architecture transformers' own."""
    if a is None:
        return (name,)
    prefix = "model." if a.part_of is None else "model.language_model."
    _, number, last = name.split(".", 2)
    stored = next((each.name for each in a.stored_linears if last in each.holds), last)
    at = f"layers.{number}."
    return tuple(dict.fromkeys((f"{prefix}{at}{stored}", f"{prefix}{name}", f"model.{name}")))


def adapter_of(adapter: AdapterConfig, names: Sequence[str]) -> LinearAdapter | None:
    """Return the adapter of the linear with these full names; None if it has none. Routers have one by
    adapter.router alone."""
    targets = adapter.target_modules
    one = targets[0] if len(targets) == 1 and not _PLAIN_NAME.fullmatch(targets[0]) else None
    wanted = targets if one is None else ".*" if one.lower() == ALL_LINEAR else one
    is_router = names[-1].endswith(".router")
    is_named = adapter.router if is_router else any(_matches("target_modules", wanted, n) for n in names)
    layers = adapter.layers_to_transform
    if not is_named or (layers is not None and layer_of(names[-1]) not in layers):
        return None
    ranks, alphas = dict(adapter.rank_pattern), dict(adapter.alpha_pattern)
    rank = next((r for n in names if (r := pattern_value(ranks, n, None)) is not None), adapter.rank)
    alpha = next((v for n in names if (v := pattern_value(alphas, n, None)) is not None), adapter.alpha)
    return LinearAdapter(rank, alpha)


def unused_entries(adapter: AdapterConfig, targets: Iterable[str], names: Collection[str]) -> list[str]:
    """Return "rank_pattern q_prj" of each pattern, and of each name among the targets, that matches none of
    the linears' full names."""
    entries = [
        ("target_modules", each, rf"(.*\.)?{re.escape(each)}")
        for each in targets
        if _PLAIN_NAME.fullmatch(each)
    ]
    entries += [("rank_pattern", key, key) for key, _ in adapter.rank_pattern]
    entries += [("alpha_pattern", key, key) for key, _ in adapter.alpha_pattern]
    return [f"{field} {entry}" for field, entry, pattern in entries if not _matches_any(pattern, names)]


def used_patterns(patterns: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the patterns that match one of the linears' full names."""
    return {key: value for key, value in patterns.items() if _matches_any(key, names)}


def _matches_any(pattern: str, names: Collection[str]) -> bool:
    return any(pattern_value({pattern: True}, name, False) for name in names)


def named_module(name: str) -> Module:
    """Return a linear that has one name."""
    return Module((name,), name.rpartition(".")[2], layer_of(name))


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a linear's name has; None if there is none."""
    match = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(match[1]) if match else None


def select(settings: Mapping[str, Any], modules: list[Module], others: Iterable[str]) -> Selection:
    """Return the linears that these fields of a LoraConfig select, by PEFT's rules."""
    targets, excluded = settings["target_modules"], settings.get("exclude_modules") or ()
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        targets, others = ".*", ()
    for name in others:
        if _matches("target_modules", targets, name) and not _matches("exclude_modules", excluded, name):
            see = " (adapter.router)" if name.endswith((".gate", ".router")) else ""
            raise UserError(f"target_modules has {name}, which can have no such adapter here{see}: remove it")
    notices = [
        f"target_modules: the model has no linear {each!r}, so nothing is trained for it"
        for each in (() if isinstance(targets, str) else sorted(map(str, targets)))
        if not any(_matches("target_modules", (each,), name) for m in modules for name in m.names)
    ]
    named = [m for m in modules if any(_matches("target_modules", targets, name) for name in m.names)]
    remaining = [m for m in named if not any(_matches("exclude_modules", excluded, name) for name in m.names)]
    if excluded and len(remaining) == len(named):
        notices.append(f"exclude_modules: nothing is excluded by {excluded!r}")
    selected = [m for m in remaining if any(_is_in_layers(settings, targets, name) for name in m.names)]
    if not selected:
        fields = "target_modules, exclude_modules and layers_to_transform"
        there_are = ", ".join(sorted({m.part for m in modules}))
        raise UserError(f"{fields} select no linear of the model; it has {there_are}")
    return Selection(selected, notices)


def parts_and_layers(selected: list[Module], modules: list[Module]) -> dict[str, Any]:
    """Return target_modules and layers_to_transform of an AdapterConfig: full names where layers differ."""
    parts = {m.part for m in selected}
    of_parts = [m for m in modules if m.part in parts]
    layers, chosen = {m.layer for m in selected}, set(selected)
    if any(m.layer in layers and m not in chosen for m in of_parts):
        return {"target_modules": tuple(sorted(m.names[-1] for m in selected)), "layers_to_transform": None}
    numbers = tuple(sorted(n for n in layers if n is not None))
    is_all = len(selected) == len(of_parts)
    return {"target_modules": tuple(sorted(parts)), "layers_to_transform": None if is_all else numbers}


def rank_and_alpha(settings: Mapping[str, Any], selected: list[Module]) -> tuple[dict[str, Any], list[str]]:
    """Return rank and alpha of an AdapterConfig, for which alpha / rank is PEFT's scaling, and the patterns
    and use_rslora where they differ between linears; and notices of patterns that match nothing."""
    ranks, alphas = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    names = [m.names[0] for m in selected]
    numbers = {
        name: (pattern_value(ranks, name, settings["r"]), pattern_value(alphas, name, settings["lora_alpha"]))
        for name in names
    }
    rank, alpha = numbers[names[0]]
    targets = settings.get("target_parameters") or ()
    unused = [
        f"{field}: no linear of the adapter matches {key!r}"
        for field, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas))
        for key in patterns
        if not any(pattern_value({key: True}, name, False) for name in (*names, *targets))
    ]
    if len(set(numbers.values())) == 1:
        return {"rank": rank, "alpha": alpha * alpha_factor(settings, rank)}, unused
    if targets:
        raise UserError("rank_pattern and alpha_pattern differ between linears, beside target_parameters")
    return {
        "rank": settings["r"],
        "alpha": float(settings["lora_alpha"]),
        "rank_pattern": tuple(used_patterns(ranks, names).items()),
        "alpha_pattern": tuple((key, float(value)) for key, value in used_patterns(alphas, names).items()),
        "use_rslora": bool(settings.get("use_rslora")),
    }, unused


def alpha_factor(settings: Mapping[str, Any], rank: int) -> float:
    """Return alpha of an AdapterConfig over lora_alpha: rsLoRA divides by the root of the rank."""
    return math.sqrt(rank) if settings.get("use_rslora") else 1.0


def pattern_value(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first key that matches the end of the name, as PEFT does."""
    for key, value in patterns.items():
        if _compiled("rank_pattern and alpha_pattern", rf"(.*\.)?({key})$").match(name):
            return value
    return default


def _matches(field: str, wanted: Any, name: str) -> bool:
    if isinstance(wanted, str):
        return _compiled(field, wanted).fullmatch(name) is not None
    return name in wanted or any(name.endswith(f".{each}") for each in wanted)


def _is_in_layers(settings: Mapping[str, Any], targets: Any, name: str) -> bool:
    """True if layers_to_transform, if there is any, has the layer. It does not count for a full name."""
    layers, patterns = settings.get("layers_to_transform"), settings.get("layers_pattern") or [r"[^.]*"]
    if layers is None or layers == [] or (not isinstance(targets, str) and name in targets):
        return True
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if match := _compiled("layers_pattern", rf"(?:^|.*?\.){pattern}\.(\d+)\.").match(name):
            return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


@functools.lru_cache(maxsize=4096)  # re keeps 512: an adapter may have a pattern for each of its linears
def _compiled(field: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{field}: {pattern!r} is not a regular expression: {error}") from error
