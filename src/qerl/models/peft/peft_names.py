"""Adapters as PEFT names and shapes them, where transformers' linears are not the decoder's.

Of linears that are stored as one (StoredLinear), PEFT has one adapter, the decoder one for each linear:

    the decoder        A_q, A_k, A_v [R, K]                    B_q, B_k, B_v [N, R]
    PEFT, exactly      A = [A_q; A_k; A_v] [3 R, K]            B = [B_q 0 0; 0 B_k 0; 0 0 B_v] [sum N, 3 R]

with 3 times the rank and alpha, so that alpha / rank is the same. The other way round, an adapter of rank R
that PEFT trained is split by B's rows: each linear has the same A.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.models.architecture import Architecture, StoredLinear
from qerl.models.layer_spec import kinds_of_linears
from qerl.models.peft.peft_experts import from_peft, to_peft
from qerl.models.peft.peft_selection import LinearAdapter, linear_names

PEFT_PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of transformers' model."""
PREFIX = f"{PEFT_PREFIX}model."
_LANGUAGE = "base_model.model.model.language_model."


def peft_tensors(architecture: Architecture | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masters, which have the decoder's names, as PEFT has them. Without an architecture, here and
    below, the linears are transformers' own."""
    if architecture is None:
        return dict(tensors)
    prefix = PREFIX if architecture.part_of is None else _LANGUAGE
    result = to_peft(architecture, tensors)
    for stored, at in _places(architecture, result):
        parts = _present(stored, at, result)
        a = [result.pop(f"{at}{part}.lora_A.weight") for part in parts]
        b = [result.pop(f"{at}{part}.lora_B.weight") for part in parts]
        result[f"{at}{stored.name}.lora_A.weight"] = torch.cat(a)
        result[f"{at}{stored.name}.lora_B.weight"] = _blocks(architecture, stored, parts, b)
    return {name.replace(PREFIX, prefix, 1): tensor for name, tensor in result.items()}


def decoder_tensors(
    architecture: Architecture | None, tensors: Mapping[str, Tensor], masters: Iterable[str]
) -> dict[str, Tensor]:
    """Return an adapter's tensors under the decoder's names; masters: the names of all its masters."""
    if architecture is None:
        return dict(tensors)
    masters = dict.fromkeys(masters)
    result = {name.replace(_LANGUAGE, PREFIX, 1): tensor for name, tensor in tensors.items()}
    result = from_peft(architecture, result, masters)
    for stored, at in _places(architecture, masters):
        names = [f"{at}{stored.name}.lora_{side}.weight" for side in "AB"]
        if not all(name in result for name in names):
            continue
        parts = _present(stored, at, masters)
        a, b = (result.pop(name) for name in names)
        for part, each in zip(parts, _split(architecture, stored, parts, a, b, names[1]), strict=True):
            for side, tensor in zip("AB", each, strict=True):
                result[f"{at}{part}.lora_{side}.weight"] = tensor.contiguous()
    return result


def peft_linears(
    architecture: Architecture | None, adapter: AdapterConfig, linears: Mapping[str, LinearAdapter]
) -> dict[str, Any]:
    """Return the same entries as peft_targets where linears are selected by name, or differ in rank or alpha:
    full names. linears: by their names in the decoder. Raise UserError if those that are stored as one
    differ."""
    by_stored: dict[str, list[LinearAdapter]] = {}
    for name, numbers in linears.items():
        by_stored.setdefault(linear_names(architecture, name)[0], []).append(numbers)
    ranks, alphas = {}, {}
    for name, parts in by_stored.items():
        if len(set(parts)) > 1:
            raise UserError(
                f"adapter.rank_pattern and alpha_pattern differ within {name}, stored as one linear"
            )
        count, (rank, alpha) = len(parts), parts[0]
        ranks[name] = count * rank
        alphas[name] = (math.sqrt(count) if adapter.use_rslora and count > 1 else count) * alpha
    entries: dict[str, Any] = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": [*by_stored]}
    for field, values, usual in (
        ("rank_pattern", ranks, adapter.rank),
        ("alpha_pattern", alphas, adapter.alpha),
    ):
        if others := {name: value for name, value in values.items() if value != usual}:
            entries[field] = others
    return entries


def peft_targets(
    architecture: Architecture | None, targets: Iterable[str], adapter: AdapterConfig
) -> dict[str, Any]:
    """Return the entries of adapter_config.json that say which linears have an adapter, and of which rank.
    targets: the linears, by the last part of their names."""
    rank, alpha, layers = adapter.rank, adapter.alpha, adapter.layers_to_transform
    where = {} if layers is None else {"layers_to_transform": list(layers)}
    if architecture is None:
        return {"r": rank, "lora_alpha": alpha, "target_modules": list(targets), **where}
    targets, names, patterns = list(targets), [], {}
    stored_as = {part: stored for stored in architecture.stored_linears for part in stored.holds}
    by_short = {linear.short_name: linear.name for linear in kinds_of_linears(architecture)}
    for target in targets:
        stored = stored_as.get(by_short[target])
        name = target if stored is None else stored.name.rpartition(".")[2]
        names += [name] * (name not in names)
        if stored is not None and len(stored.holds) > 1:
            patterns[name] = patterns.get(name, 0) + 1
    patterns = {name: count for name, count in patterns.items() if count > 1}
    modules: Any = names
    if architecture.part_of is not None:  # other modalities have linears of the same names
        of_layers = "" if layers is None else rf"layers\.({'|'.join(map(str, layers))})\."
        modules, where = rf".*\.language_model\.{of_layers}.*\.({'|'.join(names)})", {}
    entries: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": modules, **where}
    if patterns:
        entries["rank_pattern"] = {name: count * rank for name, count in patterns.items()}
        factors = {n: math.sqrt(count) if adapter.use_rslora else count for n, count in patterns.items()}
        entries["alpha_pattern"] = {name: factor * alpha for name, factor in factors.items()}
    return entries


def _places(architecture: Architecture, tensors: Collection[str]) -> list[tuple[StoredLinear, str]]:
    """Return each stored linear of which a part has an adapter, and the name of its layer with a dot."""
    places = (
        (stored, name.removesuffix(f"{part}.lora_A.weight"))
        for stored in architecture.stored_linears
        for part in stored.holds
        if not part.startswith("mlp.experts.")  # adapters of experts keep the decoder's names
        for name in tensors
        if name.endswith(f".{part}.lora_A.weight")
    )
    return list(dict.fromkeys(places))


def _present(stored: StoredLinear, at: str, tensors: Collection[str]) -> list[str]:
    return [part for part in stored.holds if f"{at}{part}.lora_A.weight" in tensors]


def _widths(architecture: Architecture, stored: StoredLinear) -> list[int]:
    by_name = {linear.name: linear.out_width for linear in kinds_of_linears(architecture)}
    return [by_name[part] for part in stored.holds]


def _blocks(architecture: Architecture, stored: StoredLinear, parts: list[str], b: list[Tensor]) -> Tensor:
    """Return B of all linears, zero for those without an adapter."""
    widths, rank = _widths(architecture, stored), b[0].shape[1]
    whole = b[0].new_zeros(sum(widths), rank * len(parts))
    rows = dict(zip(stored.holds, whole.split(widths), strict=True))
    for index, part in enumerate(parts):
        rows[part][:, index * rank : (index + 1) * rank] = b[index]
    return whole


def _split(
    architecture: Architecture, stored: StoredLinear, parts: list[str], a: Tensor, b: Tensor, name: str
) -> list[tuple[Tensor, Tensor]]:
    """Return each part's A and B."""
    widths = _widths(architecture, stored)
    if b.shape != (sum(widths), len(a)):
        raise UserError(f"{name} must have the shape {(sum(widths), len(a))}, got {tuple(b.shape)}")
    by_part = dict(zip(stored.holds, b.split(widths), strict=True))
    rows = [by_part[part] for part in parts]
    if len(a) % len(parts) == 0:
        rank = len(a) // len(parts)
        columns = [each[:, i * rank : (i + 1) * rank] for i, each in enumerate(rows)]
        if sum(int(each.count_nonzero()) for each in columns) == int(b.count_nonzero()):
            return list(zip(a.split(rank), columns, strict=True))
    if len(parts) < len(stored.holds):
        raise UserError(f"{name} is one adapter of {', '.join(stored.holds)}: target all of them")
    return [(a, each) for each in rows]
