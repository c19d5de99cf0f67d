"""Read NVFP4 and MXFP4 weights [N, K] whose tensors have our layout, under any names.

NVFP4   codes uint8 [N, K / 2], low nibble = even k     scales float8_e4m3fn [N, K / 16]    one float32
MXFP4   codes uint8 [N, K / 2], low nibble = even k     scales uint8 [N, K / 32]: E8M0
"""

from functools import partial

import torch
from torch import Tensor

from qerl.formats import MXFP4, NVFP4
from qerl.models.checkpoint.layouts.layout import (
    LayoutError,
    StoredWeight,
    TensorFolder,
    check_finite,
    check_positive,
    read_part,
)

_NVFP4_BLOCK, _MXFP4_BLOCK = 16, 32
_LARGEST_EXPONENT = 252
"""Largest exponent of E8M0 that is read: 6 * 2^(253 - 127) overflows float32."""


def nvfp4_weight(
    folder: TensorFolder, codes: str, scales: str, global_scale: str, *, is_divisor: bool
) -> StoredWeight:
    """Return the weight in tensors of these names. `is_divisor`: W = q s / g, as our format has it; else
    W = q s g, and 1 / g, rounded to float32, is our divisor."""
    read = partial(_read_nvfp4, folder, codes, scales, global_scale, is_divisor)
    return StoredWeight(two_per_byte(folder, codes), "NVFP4", NVFP4.name, (codes, scales, global_scale), read)


def mxfp4_weight(folder: TensorFolder, codes: str, scales: str) -> StoredWeight:
    read = partial(_read_mxfp4, folder, codes, scales)
    return StoredWeight(two_per_byte(folder, codes), "MXFP4", MXFP4.name, (codes, scales), read)


def two_per_byte(folder: TensorFolder, codes: str) -> tuple[int, int]:
    """Return [N, K] of codes [N, K / 2]; raise LayoutError if they are no matrix."""
    shape = folder.shapes[codes]
    if len(shape) != 2:
        raise LayoutError(f"{codes} is {list(shape)}, must have two dimensions")
    return shape[0], shape[1] * 2


def check_exponents(name: str, scales: Tensor) -> None:
    """Raise LayoutError if some code times one of these E8M0 scales is NaN or infinity."""
    if scales.numel() and scales.max().item() > _LARGEST_EXPONENT:
        raise LayoutError(f"{name} holds NaN or infinity")


def _read_nvfp4(folder: TensorFolder, codes: str, scales: str, global_scale: str, is_divisor: bool) -> NVFP4:
    n, k = _blocks(folder, codes, _NVFP4_BLOCK)
    scale_NB = read_part(folder, scales, torch.float8_e4m3fn, (n, k // _NVFP4_BLOCK))
    check_finite(scales, scale_NB)
    stored = folder.shapes.get(global_scale)
    one = read_part(folder, global_scale, torch.float32, () if stored == () else (1,)).reshape(1)
    check_positive(global_scale, one)
    g = one if is_divisor else check_positive(global_scale, one.reciprocal())
    return NVFP4(read_part(folder, codes, torch.uint8, (n, k // 2)), scale_NB, g)


def _read_mxfp4(folder: TensorFolder, codes: str, scales: str) -> MXFP4:
    n, k = _blocks(folder, codes, _MXFP4_BLOCK)
    dtypes = (torch.uint8, torch.float8_e8m0fnu)
    scale_NB = read_part(folder, scales, dtypes, (n, k // _MXFP4_BLOCK)).view(torch.uint8)
    check_exponents(scales, scale_NB)
    return MXFP4(read_part(folder, codes, torch.uint8, (n, k // 2)), scale_NB)


def _blocks(folder: TensorFolder, codes: str, block_weights: int) -> tuple[int, int]:
    n, k = two_per_byte(folder, codes)
    if k % block_weights:
        raise LayoutError(f"{codes} has rows of {k} weights, must be a multiple of {block_weights}")
    return n, k
