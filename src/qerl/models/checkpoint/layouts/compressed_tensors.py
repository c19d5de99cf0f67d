"""The layouts of compressed-tensors (llm-compressor, `qerl quantize`).

    nvfp4-pack-quantized   weight_packed uint8, weight_scale, weight_global_scale      four_bit_float.py
    mxfp4-pack-quantized   weight_packed uint8, weight_scale                           four_bit_float.py
    pack-quantized         weight_packed int32, weight_scale, weight_shape,            scaled_codes.py
                           weight_zero_point and weight_g_idx if the scheme has them
    float-quantized        weight e4m3, weight_scale                                   scaled_codes.py
    mxfp8-quantized        weight e4m3, weight_scale: exponents of 32 weights          scaled_codes.py
    int-quantized          weight int8, weight_scale, weight_zero_point if asymmetric  scaled_codes.py
    naive-quantized        as one of the last three

A module is quantized if it has a weight_packed, or a weight of 8 bits. Its scheme is that of the group in
config_groups whose targets name it, by its name, by a regex (re:) or by its class, in this order. `ignore`
need not be read: what it names is stored in full precision.

`WRITTEN` has the layouts of our own 4-bit checkpoints, which transformers and vLLM load:

    NVFP4 codes          {linear}.weight_packed        uint8 [N, K / 2]            nvfp4-pack-quantized
          scales         {linear}.weight_scale         float8_e4m3fn [N, K / 16]
          global_scale   {linear}.weight_global_scale  float32 [1]
    MXFP4 codes          {linear}.weight_packed        uint8 [N, K / 2]            mxfp4-pack-quantized
          scales         {linear}.weight_scale         uint8 [N, K / 32]
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch

from qerl.errors import UserError
from qerl.models.checkpoint.layouts.four_bit_float import mxfp4_weight, nvfp4_weight
from qerl.models.checkpoint.layouts.layout import Layout, StoredWeight, TensorFolder, modules_with
from qerl.models.checkpoint.layouts.scaled_codes import (
    PER_CHANNEL,
    PER_TENSOR,
    Granularity,
    packed_int_weight,
    scaled_weight,
)

NAME = "compressed-tensors"
_NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}
_MXFP4 = _NVFP4 | {"group_size": 32}


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    _refuse_others(folder, config)
    groups = _groups(folder, config)
    weights = {}
    for module in _quantized_modules(folder):
        format, scheme = _scheme(folder, module, groups)
        weights[module] = _FORMATS[format](folder, module, scheme)
    unused = frozenset(name for name in folder.shapes if name.endswith(_UNUSED))
    return Layout(NAME, weights, unused, _dropped(config, groups))


_UNUSED = (
    ".input_global_scale",
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


def _refuse_others(folder: TensorFolder, config: dict[str, Any]) -> None:
    """Raise UserError for what changes the weights' meaning: sparsity and online transforms."""
    sparsity, transforms = config.get("sparsity_config"), config.get("transform_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise UserError(f"{folder.path}: {NAME} with sparsity {sparsity['format']} is not supported")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise UserError(f"{folder.path}: {NAME} with transforms (QuIP, SpinQuant) is not supported")


_Group = tuple[tuple[str, ...], str, dict[str, Any], dict[str, Any]]
"""Targets, format, the scheme of weights and the whole group."""


def _groups(folder: TensorFolder, config: dict[str, Any]) -> list[_Group]:
    stored, found = config.get("config_groups"), []
    for group in stored.values() if isinstance(stored, dict) else []:
        weights = group.get("weights") if isinstance(group, dict) else None
        format = (group.get("format") if isinstance(group, dict) else None) or config.get("format")
        if not isinstance(format, str) or format not in _FORMATS:
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
    eight_bits = [
        module for module in modules_with(folder, "weight") if folder.dtypes[f"{module}.weight"].itemsize == 1
    ]
    return modules_with(folder, "weight_packed") + eight_bits


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


def _packed_int(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    bits, granularity = scheme.get("num_bits"), _granularity(folder, scheme)
    if bits not in (2, 4, 8) or granularity.rows != 1:
        kind = f"pack-quantized with {bits} bits {granularity}"
        raise UserError(
            f"{folder.path}: {kind} is not supported; supported are 2, 4 and 8 bits per channel or group"
        )
    is_symmetric = scheme.get("symmetric", True) is not False
    return packed_int_weight(folder, module, bits, granularity.columns, is_symmetric)


def _eight_bits(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    zeros = f"{module}.weight_zero_point"
    return scaled_weight(
        folder,
        f"{module}.weight",
        f"{module}.weight_scale",
        _granularity(folder, scheme),
        zero_points=None if scheme.get("symmetric", True) is not False else zeros,
    )


def _granularity(folder: TensorFolder, scheme: dict[str, Any]) -> Granularity:
    strategy, group, block = (scheme.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy is None:
        strategy = (
            "group" if isinstance(group, int) and group > 0 else "tensor" if group is None else "channel"
        )
    if strategy in ("tensor", "channel"):
        return PER_TENSOR if strategy == "tensor" else PER_CHANNEL
    sizes = block if strategy == "block" else [1, group] if strategy == "group" else None
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or any(type(x) is not int or x < 1 for x in sizes)
    ):
        asked = f"strategy {strategy}, group_size {group}, block_structure {block}"
        raise UserError(f"{folder.path}: quantization_config: {asked} is not supported")
    return Granularity(*sizes)


_FORMATS: dict[str, Callable[[TensorFolder, str, dict[str, Any]], StoredWeight]] = {
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
    "pack-quantized": _packed_int,
    "float-quantized": _eight_bits,
    "mxfp8-quantized": _eight_bits,
    "int-quantized": _eight_bits,
    "naive-quantized": _eight_bits,
}
_NEEDS: dict[str, dict[str, Any]] = {
    "nvfp4-pack-quantized": _NVFP4,
    "mxfp4-pack-quantized": _MXFP4,
    "pack-quantized": {"type": "int"},
    "float-quantized": {"type": "float", "num_bits": 8},
    "mxfp8-quantized": {"type": "float", "num_bits": 8, "group_size": 32},
    "int-quantized": {"type": "int", "num_bits": 8},
    "naive-quantized": {"num_bits": 8},
}


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenLayout:
    """Layout of the tensors of one format in a checkpoint that is written."""

    format: str
    checkpoint_format: str
    """`format` in quantization_config."""
    strategy: str
    scale_dtype: torch.dtype
    suffixes: dict[str, str]
    """Suffix of each tensor's name, by the field of our format."""

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """Return the quantization_config; ignored: modules in full precision, as compressed-tensors names
        them."""
        weights = {"num_bits": 4, "type": "float", "strategy": self.strategy}
        weights |= _NEEDS[self.checkpoint_format]
        weights |= {"dynamic": False, "scale_dtype": str(self.scale_dtype)}
        group = {"targets": ["Linear"], "weights": weights, "format": self.checkpoint_format}
        return {
            "quant_method": NAME,
            "format": self.checkpoint_format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }


_FIELDS = {"codes": "weight_packed", "scales": "weight_scale"}
_NVFP4_FIELDS = _FIELDS | {"global_scale": "weight_global_scale"}
WRITTEN = {
    "nvfp4": WrittenLayout(
        "nvfp4", "nvfp4-pack-quantized", "tensor_group", torch.float8_e4m3fn, _NVFP4_FIELDS
    ),
    "mxfp4": WrittenLayout("mxfp4", "mxfp4-pack-quantized", "group", torch.uint8, _FIELDS),
}
