"""The layouts of NVIDIA's ModelOpt: quantization_config, or hf_quant_config.json beside config.json.

    NVFP4         weight uint8 [N, K / 2], low nibble = even k     weight_scale e4m3 [N, K / 16]
                  weight_scale_2 float32: a multiplier, where compressed-tensors' global scale is a divisor
    FP8, INT8     weight e4m3 or int8 [N, K]     weight_scale: one number, [N], or a block's of [N / R, K / C]
    MXFP8         weight e4m3 [N, K]             weight_scale uint8 [N, K / 32]: exponents
    all           pre_quant_scale [K], where AWQ left factors of the input;
                  input_scale, k_scale and v_scale are for activations and the KV cache: not used

The dtype of a module's weight says which of them it is, so one checkpoint may have several. The divisor of
NVFP4 is 1 / weight_scale_2, rounded to float32.
"""

from typing import Any

import torch
from torch import Tensor

from qerl.formats import NVFP4
from qerl.models.checkpoint.layouts.four_bit_float import nvfp4_weight
from qerl.models.checkpoint.layouts.layout import (
    Layout,
    LayoutError,
    StoredWeight,
    TensorFolder,
    check_finite,
    modules_with,
    read_part,
)
from qerl.models.checkpoint.layouts.scaled_codes import (
    PER_CHANNEL,
    PER_TENSOR,
    Granularity,
    matrix_shape,
    scaled_weight,
)

NAME = "ModelOpt"
METHODS = "modelopt", "modelopt_fp4", "modelopt_mixed"
CONFIG_FILE = "hf_quant_config.json"
_UNUSED = ".input_scale", ".k_scale", ".v_scale", ".q_scale", ".k_bias", ".v_bias"
_PACKED_DTYPES = torch.uint8, torch.int8, torch.float8_e4m3fn
_MX_BLOCK = 32
_DYNAMIC = "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN"
"""Algorithms that quantize activations without a stored scale."""


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    """config: quantization_config, or the content of hf_quant_config.json."""
    inner = config.get("quantization")
    settings = inner if isinstance(inner, dict) else config
    weights = {
        module: _weight(folder, module)
        for module in modules_with(folder, "weight")
        if folder.dtypes[f"{module}.weight"] in _PACKED_DTYPES
    }
    algo = str(settings.get("quant_algo"))
    if not weights:
        raise LayoutError(f"is quantized with {NAME} {algo}, but has no quantized weight")
    unused = frozenset(name for name in folder.shapes if name.endswith(_UNUSED))
    return Layout(NAME, weights, unused, _dropped(folder, settings, weights))


def _weight(folder: TensorFolder, module: str) -> StoredWeight:
    weight, scale, scale_2 = (f"{module}.weight{x}" for x in ("", "_scale", "_scale_2"))
    if f"{module}.svdquant_lora_a" in folder.shapes:
        raise LayoutError(f"{module}: {NAME}'s SVDQuant is not supported")
    if scale not in folder.shapes:
        raise LayoutError(f"has no tensor {scale}")
    factors = f"{module}.pre_quant_scale" if f"{module}.pre_quant_scale" in folder.shapes else None
    if folder.dtypes[weight] != torch.uint8:
        granularity = _granularity(folder, weight, scale)
        return scaled_weight(folder, weight, scale, granularity, input_factors=factors)
    if scale_2 not in folder.shapes:
        raise LayoutError(f"{weight} is in 4 bits without {scale_2}; of these, only NVFP4 is supported")
    stored = nvfp4_weight(folder, weight, scale, scale_2, is_divisor=False)
    return stored if factors is None else _with_factors(folder, stored, factors)


def _with_factors(folder: TensorFolder, stored: StoredWeight, factors: str) -> StoredWeight:
    def read() -> Tensor:
        packed = stored.read()
        assert isinstance(packed, NVFP4)
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        factors_K = read_part(folder, factors, dtypes, (stored.shape[1],)).float()
        return packed.decode().mul_(check_finite(factors, factors_K))

    return StoredWeight(stored.shape, "NVFP4 with AWQ's factors", None, (*stored.parts, factors), read)


def _granularity(folder: TensorFolder, weight: str, scale: str) -> Granularity:
    """Return what the shape of the scales says."""
    (n, _), dtype = matrix_shape(folder, weight), folder.dtypes[scale]
    sizes = tuple(size for size in folder.shapes[scale] if size != 1)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return Granularity(1, _MX_BLOCK)
    return {(): PER_TENSOR, (n,): PER_CHANNEL}.get(sizes, Granularity(128, 128))


def _dropped(
    folder: TensorFolder, settings: dict[str, Any], weights: dict[str, StoredWeight]
) -> tuple[str, ...]:
    inputs = {module for module in weights if f"{module}.input_scale" in folder.shapes}
    inputs = inputs or set(weights if settings.get("quant_algo") in _DYNAMIC else ())
    bits = sorted({4 if weights[module].kind.startswith("NVFP4") else 8 for module in inputs})
    said = [f"quantization of activations to {' and '.join(map(str, bits))} bits"] * bool(bits)
    has_cache = settings.get("kv_cache_quant_algo") or settings.get("kv_cache_scheme")
    return *said, *["quantization of the KV cache"] * bool(has_cache)
