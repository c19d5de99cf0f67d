"""FP8 as DeepSeek, Qwen, Mistral and Meta publish it.

    fp8          weight e4m3 [N, K]    weight_scale_inv [N / R, K / C], weight_block_size is [R, C]:
                                       a multiplier in spite of its name; without a block size one number
    fbgemm_fp8   weight e4m3 [N, K]    weight_scale [N, 1]

Activations are quantized by dynamic scales, or by activation_scale and input_scale: neither is used.
"""

from typing import Any

from qerl.models.checkpoint.layouts.layout import (
    Layout,
    LayoutError,
    StoredWeight,
    TensorFolder,
    modules_with,
)
from qerl.models.checkpoint.layouts.scaled_codes import (
    FP8_DTYPES,
    PER_CHANNEL,
    PER_TENSOR,
    Granularity,
    scaled_weight,
)

METHODS = "fp8", "fbgemm_fp8"
_UNUSED = ".activation_scale", ".input_scale", ".input_scale_ub", ".k_scale", ".v_scale"
_SCALES = "weight_scale_inv", "weight_scale"


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    granularity = _granularity(config)
    weights = {
        module: _weight(folder, module, granularity)
        for module in modules_with(folder, "weight")
        if folder.dtypes[f"{module}.weight"] in FP8_DTYPES
    }
    if not weights:
        raise LayoutError(f"is quantized with {config['quant_method']}, but no weight is in FP8")
    unused = frozenset(name for name in folder.shapes if name.endswith(_UNUSED))
    return Layout(f"{config['quant_method']}", weights, unused, ("quantization of activations to 8 bits",))


def _granularity(config: dict[str, Any]) -> Granularity:
    if config["quant_method"] == "fbgemm_fp8":
        return PER_CHANNEL
    block = config.get("weight_block_size")
    if block is None:
        return PER_TENSOR
    if (granularity := Granularity.of_block(block)) is None:
        raise LayoutError(f"weight_block_size must be two positive integers, is {block!r}")
    return granularity


def _weight(folder: TensorFolder, module: str, granularity: Granularity) -> StoredWeight:
    scales = next((name for name in _SCALES if f"{module}.{name}" in folder.shapes), None)
    if scales is None:
        raise LayoutError(f"has no tensor {module}.{_SCALES[0]}")
    return scaled_weight(folder, f"{module}.weight", f"{module}.{scales}", granularity)
