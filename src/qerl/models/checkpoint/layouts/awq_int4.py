"""AWQ: 4-bit integers with zero points, in AutoAWQ's layout `gemm`.

    {module}.qweight   int32 [K, N / 8]           8 outputs a word, nibble i is output (0 2 4 6 1 3 5 7)[i]
    {module}.qzeros    int32 [K / group, N / 8]   zero points, in the same order
    {module}.scales    float16 [K / group, N]
    W[n, k] = (q - z) * s

Codes with a scale per group fit none of our formats; with one group for all inputs they are INT8's.
Source: AutoAWQ's WQLinear_GEMM. Other versions (gemv, marlin, ...) store other orders.
"""

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
from qerl.models.checkpoint.layouts.scaled_codes import Granularity, decode, int8_weight, unpack_int32

NAME = "AWQ"
_PER_WORD = 8
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]
_SCALES = torch.float16, torch.bfloat16, torch.float32


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    version = config.get("version") or config.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise LayoutError(
            f"is quantized with {NAME} {version!r:.80}, which is not supported; supported is gemm"
        )
    if (bits := config.get("bits", config.get("w_bit", 4))) != 4:
        raise LayoutError(f"{NAME} needs bits 4, got {bits!r:.80}")
    return Layout(NAME, {module: _stored(folder, module) for module in modules_with(folder, "qweight")})


def _stored(folder: TensorFolder, module: str) -> StoredWeight:
    qweight, qzeros, scales = parts = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    shape, grouped = folder.shapes[qweight], folder.shapes.get(scales, ())
    if len(shape) != 2 or 0 in shape:
        raise LayoutError(f"{qweight} is {list(shape)}, must be [K, N / {_PER_WORD}]")
    k, n = shape[0], shape[1] * _PER_WORD
    num_groups = grouped[0] if len(grouped) == 2 else 0
    if scales in folder.shapes and (num_groups == 0 or k % num_groups or grouped[1] != n):
        raise LayoutError(f"{scales} is {list(grouped)}, must be [K / group, {n}] with K = {k}")
    fits = num_groups == 1
    granularity = Granularity(1, None if fits else k // max(num_groups, 1))
    read = partial(_read, folder, (qweight, qzeros, scales), k, n, num_groups)
    return StoredWeight((n, k), f"int4 {granularity}", INT8.name if fits else None, parts, read)


def _read(
    folder: TensorFolder, names: tuple[str, str, str], k: int, n: int, num_groups: int
) -> PackedWeight | Tensor:
    qweight, qzeros, scales = names
    codes_NK = _outputs(read_part(folder, qweight, torch.int32, (k, n // _PER_WORD)))
    zeros_NG = _outputs(read_part(folder, qzeros, torch.int32, (num_groups, n // _PER_WORD)))
    scales_NG = check_finite(scales, read_part(folder, scales, _SCALES, (num_groups, n))).T.float()
    if num_groups == 1:
        return int8_weight(codes_NK, zeros_NG, scales_NG)
    return decode(codes_NK, scales_NG, Granularity(1, k // num_groups), zeros_NG.float())


def _outputs(words: Tensor) -> Tensor:
    """int32 [.., N / 8] -> codes [N, ..], outputs in order."""
    by_word = unpack_int32(words, 4).unflatten(1, (-1, _PER_WORD))
    return by_word[..., _NIBBLE_OF_OUTPUT].flatten(1).T.contiguous()
