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

from qerl.models.checkpoint.layouts.four_bit_float import mxfp4_weight, nvfp4_weight
from qerl.models.checkpoint.layouts.layout import (
    Layout,
    LayoutError,
    StoredWeight,
    TensorFolder,
    modules_with,
)
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


_UNUSED = (
    *(".input_global_scale", ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".k_scale", ".v_scale", ".q_scale"),
)


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    _refuse_others(config)
    groups, weights = _groups(config), {}
    for module in _quantized_modules(folder):
        _, format, scheme, _ = _group_of(module, groups)
        weights[module] = _FORMATS[format][0](folder, module, scheme)
    unused = frozenset(name for name in folder.shapes if name.endswith(_UNUSED))
    return Layout(NAME, weights, unused, _dropped(config, groups))


def _refuse_others(config: dict[str, Any]) -> None:
    """Raise LayoutError for what changes the weights' meaning: sparsity and online transforms."""
    sparsity, transforms = config.get("sparsity_config"), config.get("transform_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise LayoutError(f"{NAME} with sparsity {sparsity['format']} is not supported")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise LayoutError(f"{NAME} with transforms (QuIP, SpinQuant) is not supported")


_Group = tuple[tuple[str, ...], str, dict[str, Any], dict[str, Any]]
"""Targets, format, the scheme of weights and the whole group."""


def _groups(config: dict[str, Any]) -> list[_Group]:
    stored, groups = config.get("config_groups"), []
    for group in stored.values() if isinstance(stored, dict) else []:
        weights = group.get("weights") if isinstance(group, dict) else None
        format = (group.get("format") if isinstance(group, dict) else None) or config.get("format")
        if not isinstance(format, str) or format not in _FORMATS:
            raise LayoutError(f"is quantized with {NAME} {format}; supported are {', '.join(_FORMATS)}")
        for key, value in _FORMATS[format][1].items():
            if not isinstance(weights, dict) or weights.get(key) != value:
                got = weights.get(key) if isinstance(weights, dict) else weights
                raise LayoutError(f"quantization_config: {format} needs {key} {value}, got {got}")
        targets = group.get("targets") or ()
        if not isinstance(targets, list | tuple) or not all(isinstance(x, str) for x in targets):
            raise LayoutError("quantization_config: targets must be a list of names")
        groups.append((tuple(targets), format, weights, group))
    if not groups:
        kind = f"{NAME} {config['format']}" if config.get("format") else NAME
        raise LayoutError(f"is quantized with {kind}, but its config has no config_groups")
    return groups


def _quantized_modules(folder: TensorFolder) -> list[str]:
    weights = modules_with(folder, "weight")
    eight_bits = [module for module in weights if folder.dtypes[f"{module}.weight"].itemsize == 1]
    return modules_with(folder, "weight_packed") + eight_bits


def _group_of(module: str, groups: list[_Group]) -> _Group:
    """Return the module's group; one that names it comes before a regex, a regex before a class."""
    if len(groups) == 1:
        return groups[0]
    group = min(groups, key=lambda group: _precedence(group[0], module))
    if _precedence(group[0], module) == 3:
        raise LayoutError(f"{module} is quantized, but no group of quantization_config targets it")
    return group


def _precedence(targets: tuple[str, ...], module: str) -> int:
    """Return 0 if the targets have the module's name, 1 a regex that matches it, 2 its class, else 3."""
    if module in targets:
        return 0
    if any(x.startswith("re:") and re.match(x.removeprefix("re:"), module) for x in targets):
        return 1
    return 2 if ("Embedding" if module.endswith("embed_tokens") else "Linear") in targets else 3


def _dropped(config: dict[str, Any], groups: list[_Group]) -> tuple[str, ...]:
    inputs = [group.get("input_activations") for *_, group in groups]
    bits = sorted({str(each.get("num_bits")) for each in inputs if isinstance(each, dict)})
    activations = [f"quantization of activations to {' and '.join(bits)} bits"] * bool(bits)
    return *activations, *["quantization of the KV cache"] * bool(config.get("kv_cache_scheme"))


def _nvfp4(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    codes, scales, scale = (f"{module}.weight_{x}" for x in ("packed", "scale", "global_scale"))
    return nvfp4_weight(folder, codes, scales, scale, is_divisor=True)


def _mxfp4(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    return mxfp4_weight(folder, f"{module}.weight_packed", f"{module}.weight_scale")


def _packed_int(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    bits, granularity = scheme.get("num_bits"), _granularity(scheme)
    if bits not in (2, 4, 8) or granularity.rows != 1:
        kind = f"pack-quantized with {bits} bits {granularity}"
        raise LayoutError(f"{kind} is not supported; supported are 2, 4 and 8 bits per channel or group")
    is_symmetric = scheme.get("symmetric", True) is not False
    return packed_int_weight(folder, module, bits, granularity.columns, is_symmetric)


def _eight_bits(folder: TensorFolder, module: str, scheme: dict[str, Any]) -> StoredWeight:
    weight = f"{module}.weight"
    zeros = f"{weight}_zero_point" if scheme.get("symmetric", True) is False else None
    return scaled_weight(folder, weight, f"{weight}_scale", _granularity(scheme), zero_points=zeros)


def _granularity(scheme: dict[str, Any]) -> Granularity:
    strategy, group, block = (scheme.get(key) for key in ("strategy", "group_size", "block_structure"))
    if strategy is None:
        strategy = (
            "group" if isinstance(group, int) and group > 0 else "tensor" if group is None else "channel"
        )
    if strategy in ("tensor", "channel"):
        return PER_TENSOR if strategy == "tensor" else PER_CHANNEL
    sizes = block if strategy == "block" else [1, group] if strategy == "group" else None
    if (granularity := Granularity.of_block(sizes)) is None:
        text = f"strategy {strategy}, group_size {group}, block_structure {block}"
        raise LayoutError(f"quantization_config: {text} is not supported")
    return granularity


_FORMATS: dict[str, tuple[Callable[[TensorFolder, str, dict[str, Any]], StoredWeight], dict[str, Any]]] = {
    "nvfp4-pack-quantized": (_nvfp4, _NVFP4),
    "mxfp4-pack-quantized": (_mxfp4, _MXFP4),
    "pack-quantized": (_packed_int, {"type": "int"}),
    "float-quantized": (_eight_bits, {"type": "float", "num_bits": 8}),
    "mxfp8-quantized": (_eight_bits, {"type": "float", "num_bits": 8, "group_size": 32}),
    "int-quantized": (_eight_bits, {"type": "int", "num_bits": 8}),
    "naive-quantized": (_eight_bits, {"num_bits": 8}),
}
"""The function that describes a weight, and the entries that the scheme must have."""


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
        weights |= _FORMATS[self.checkpoint_format][1]
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
