"""The layouts of compressed-tensors (llm-compressor, `qerl quantize`).

    nvfp4-pack-quantized   weight_packed, weight_scale, weight_global_scale      four_bit_float.py
    mxfp4-pack-quantized   weight_packed, weight_scale                           four_bit_float.py

A module is quantized if it has such tensors; its scheme is that of the group in config_groups whose targets
name it, by its name, by a regex (re:) or by its class.
"""

import re
from collections.abc import Callable
from typing import Any

from qerl.errors import UserError
from qerl.models.layouts.four_bit_float import mxfp4_weight, nvfp4_weight
from qerl.models.layouts.layout import Layout, StoredWeight, TensorFolder, modules_with

NAME = "compressed-tensors"
_NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}
_MXFP4 = _NVFP4 | {"group_size": 32}


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    groups = _groups(folder, config)
    weights = {}
    for module in _quantized_modules(folder):
        format, scheme = _scheme(folder, module, groups)
        weights[module] = _FORMATS[format](folder, module, scheme)
    unused = frozenset(name for name in folder.shapes if name.endswith(_UNUSED))
    return Layout(NAME, weights, unused, _dropped(config, groups))


_UNUSED = ".input_global_scale", ".input_scale", ".input_zero_point"
_Group = tuple[tuple[str, ...], str, dict[str, Any], dict[str, Any]]
"""Targets, format, the scheme of weights and the whole group."""


def _groups(folder: TensorFolder, config: dict[str, Any]) -> list[_Group]:
    stored, found = config.get("config_groups"), []
    for group in stored.values() if isinstance(stored, dict) else []:
        weights = group.get("weights") if isinstance(group, dict) else None
        format = (group.get("format") if isinstance(group, dict) else None) or config.get("format")
        if format not in _FORMATS:
            raise UserError(
                f"{folder.path}: is quantized with {NAME} {format}; supported are {', '.join(_FORMATS)}"
            )
        for key, value in _NEEDS[format].items():
            if not isinstance(weights, dict) or weights.get(key) != value:
                got = weights.get(key) if isinstance(weights, dict) else weights
                raise UserError(
                    f"{folder.path}: quantization_config: {format} needs {key} {value}, got {got}"
                )
        targets = group.get("targets") or ()
        if not isinstance(targets, list | tuple) or not all(isinstance(x, str) for x in targets):
            raise UserError(f"{folder.path}: quantization_config: targets must be a list of names")
        found.append((tuple(targets), format, weights, group))
    if not found:
        kind = f"{NAME} {config['format']}" if config.get("format") else NAME
        raise UserError(f"{folder.path}: is quantized with {kind}, but its config has no config_groups")
    return found


def _quantized_modules(folder: TensorFolder) -> list[str]:
    return modules_with(folder, "weight_packed")


def _scheme(folder: TensorFolder, module: str, groups: list[_Group]) -> tuple[str, dict[str, Any]]:
    """Return format and scheme of the module's group; a group that names it comes before a regex, a regex
    before a class."""
    if len(groups) == 1:
        return groups[0][1], groups[0][2]
    for matches in (_is_name, _is_regex, _is_class):
        for targets, format, scheme, _ in groups:
            if any(matches(target, module) for target in targets):
                return format, scheme
    raise UserError(f"{folder.path}: {module} is quantized, but no group of quantization_config targets it")


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_regex(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target.removeprefix("re:"), module) is not None


def _is_class(target: str, module: str) -> bool:
    return target == ("Embedding" if module.endswith("embed_tokens") else "Linear")


def _dropped(config: dict[str, Any], groups: list[_Group]) -> tuple[str, ...]:
    found = [group.get("input_activations") for *_, group in groups]
    bits = sorted({str(each.get("num_bits")) for each in found if isinstance(each, dict)})
    said = [f"quantization of activations to {' and '.join(bits)} bits"] * bool(bits)
    return *said, *["quantization of the KV cache"] * bool(config.get("kv_cache_scheme"))


def _nvfp4(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    codes, scales, scale = (f"{module}.weight_{x}" for x in ("packed", "scale", "global_scale"))
    return nvfp4_weight(folder, codes, scales, scale, is_divisor=True)


def _mxfp4(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    return mxfp4_weight(folder, f"{module}.weight_packed", f"{module}.weight_scale")


_FORMATS: dict[str, Callable[[TensorFolder, str, dict[str, Any]], StoredWeight]] = {
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
}
_NEEDS: dict[str, dict[str, Any]] = {"nvfp4-pack-quantized": _NVFP4, "mxfp4-pack-quantized": _MXFP4}
