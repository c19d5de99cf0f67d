"""GPTQ: integers of 4 or 8 bits (b) with zero points, as AutoGPTQ and GPTQModel write them.

    {module}.qweight   int32 [K b / 32, N]                32 / b inputs a word, the first in the lowest bits
    {module}.qzeros    int32 [groups, N b / 32]           zero points: z - 1 in `gptq`, z in `gptq_v2`
    {module}.scales    float16 [groups, N]
    {module}.g_idx     int32 [K]                          group of each input; without it k // group size
    W[n, k] = (q - z) * s

With `desc_act` inputs are grouped in the order of their activations, which g_idx holds. `gptq` stores z - 1
within b bits, so that 15 (255) stands for z = 0. Codes with a scale per group fit none of our formats; with
one group for all inputs they are INT8's (of 8 bits, if every z is 128). Source: GPTQModel's BaseQuantLinear.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl.formats import INT8, PackedWeight
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
    Granularity,
    decode,
    int8_weight,
    read_group_index,
    unpack_int32,
)

NAME = "GPTQ"
_FORMATS = "gptq", "gptq_v2"
_SCALES = torch.float16, torch.bfloat16, torch.float32
_UNBIASED = "LlamaForCausalLM", "MistralForCausalLM"


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        kind = "marlin"
    if kind not in _FORMATS:
        supported = " and ".join(_FORMATS)
        raise LayoutError(
            f"is quantized with {NAME} {kind!r:.80}, which is not supported; supported are {supported}"
        )
    modules = modules_with(folder, "qweight")
    bits, group_size = config.get("bits"), config.get("group_size")
    weights = {module: _stored(folder, module, bits, group_size, kind == "gptq") for module in modules}
    return Layout(NAME, weights, _zero_biases(folder, modules))


def _stored(folder: TensorFolder, module: str, bits: Any, group_size: Any, is_shifted: bool) -> StoredWeight:
    names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    has_map = names["g_idx"] in folder.shapes
    shape, grouped = folder.shapes[names["qweight"]], folder.shapes.get(names["scales"], (1, 1))
    if len(shape) != 2 or 0 in shape or len(grouped) != 2 or 0 in grouped:
        raise LayoutError(f"{names['qweight']} or {names['scales']} is not a matrix")
    if has_map:  # some modules may have other bits (`dynamic`)
        bits = shape[0] * 32 / max((1, *folder.shapes[names["g_idx"]]))
    if bits not in (4, 8):
        raise LayoutError(f"{module}: {NAME} needs bits 4 or 8, got {bits!r:.80}")
    bits = int(bits)
    k, n, num_groups = shape[0] * 32 // bits, shape[1], grouped[0]
    if not has_map:
        del names["g_idx"]
        if k % num_groups or (group_size not in (None, -1) and group_size * num_groups != k):
            has = f"{names['scales']} is {list(grouped)}"
            raise LayoutError(f"{has}, which does not fit K = {k} and group_size {group_size!r:.80}")
    zeros = partial(_zeros, folder, names["qzeros"], (num_groups, n), bits, is_shifted)
    fits = num_groups == 1 and (bits == 4 or bool((zeros() == 128).all()))
    granularity = Granularity(1, None if num_groups == 1 else -(-k // num_groups))
    read = partial(_read, folder, names, (n, k), bits, zeros, granularity, fits)
    format, parts = INT8.name if fits else None, tuple(names.values())
    return StoredWeight((n, k), f"int{bits} {granularity}", format, parts, read)


def _zeros(folder: TensorFolder, name: str, shape: tuple[int, int], bits: int, is_shifted: bool) -> Tensor:
    """Return the zero points, uint8 [N, groups]."""
    words = read_part(folder, name, torch.int32, (shape[0], shape[1] * bits // 32))
    stored_GN = unpack_int32(words, bits).view(torch.uint8)
    return ((stored_GN + is_shifted) & ((1 << bits) - 1)).T.contiguous()


def _read(
    folder: TensorFolder,
    names: dict[str, str],
    shape: tuple[int, int],
    bits: int,
    zeros: Callable[[], Tensor],
    granularity: Granularity,
    fits: bool,
) -> PackedWeight | Tensor:
    (n, k), (_, num_groups) = shape, granularity.grid(*shape)
    words = read_part(folder, names["qweight"], torch.int32, (k * bits // 32, n))
    codes_NK = unpack_int32(words.T, bits).view(torch.uint8)
    scales_GN = read_part(folder, names["scales"], _SCALES, (num_groups, n))
    scales_NG = check_finite(names["scales"], scales_GN).T.float()
    zeros_NG = zeros()
    if fits:
        return int8_weight(codes_NK, zeros_NG, scales_NG)
    has_map = "g_idx" in names
    group_index_K = read_group_index(folder, names["g_idx"], k, num_groups) if has_map else None
    return decode(codes_NK, scales_NG, granularity, zeros_NG.float(), group_index_K)


def _zero_biases(folder: TensorFolder, modules: list[str]) -> frozenset[str]:
    """Return the biases that old versions of AutoGPTQ added to classes without biases; all are 0."""
    classes = folder.config.get("architectures") or [None]
    has_biases = folder.config.get("attention_bias") or folder.config.get("mlp_bias")
    if classes[0] not in _UNBIASED or has_biases:
        return frozenset()
    biases = [f"{module}.bias" for module in modules if f"{module}.bias" in folder.shapes]
    return frozenset(name for name in biases if not folder.read(name).any())
