"""Block scales by least squared error, for the formats of four-bit floats: the same codes' grid, other steps.

    s_b = the candidate with the least sum over block b of (q(w / s) * s - w)^2

    NVFP4   the plain E4M3 scale, the 3 below it and the 5 above: 0.75 to 1.5 times, so that the largest
            weight may be clipped, or become 4 instead of 6
    MXFP4   the plain power of two, half of it and twice it

The plain scale is a candidate and the first of equals, so no block's error is above plain rounding's
(tests/formats/test_block_scale.py). The global scale stays: linears that share it go on sharing it.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from qerl.formats import e2m1
from qerl.formats.mxfp4 import MXFP4
from qerl.formats.nvfp4 import NVFP4
from qerl.formats.packed import PackedWeight, row_chunks

_NVFP4_STEPS = (-1, -2, -3, 1, 2, 3, 4, 5)
_MXFP4_STEPS = (-1, 1)
_E4M3_RANGE = 1, 0x7E
"""The bits of its smallest and its largest positive number; they ascend with it."""
_E8M0_RANGE = 0, 252


def least_squares(packed: PackedWeight, weight_NK: Tensor) -> PackedWeight:
    """`packed` is the plain encoding of this weight, in NVFP4 or MXFP4: other formats have no such scales."""
    if isinstance(packed, NVFP4):
        return _nvfp4(packed, weight_NK)
    assert isinstance(packed, MXFP4), packed
    return _mxfp4(packed, weight_NK)


def _nvfp4(packed: NVFP4, weight_NK: Tensor) -> NVFP4:
    bits_NB = packed.scales.view(torch.uint8)

    def scale(bits: Tensor) -> Tensor:
        return bits.view(torch.float8_e4m3fn).float() / packed.global_scale

    codes, bits = _searched(packed.codes, bits_NB, weight_NK, scale, _NVFP4_STEPS, _E4M3_RANGE)
    return NVFP4(codes, bits.view(torch.float8_e4m3fn), packed.global_scale)


def _mxfp4(packed: MXFP4, weight_NK: Tensor) -> MXFP4:
    def scale(bits: Tensor) -> Tensor:
        return bits.view(torch.float8_e8m0fnu).float()

    return MXFP4(*_searched(packed.codes, packed.scales, weight_NK, scale, _MXFP4_STEPS, _E8M0_RANGE))


def _searched(
    codes: Tensor,
    bits_NB: Tensor,
    weight_NK: Tensor,
    scale: Callable[[Tensor], Tensor],
    steps: tuple[int, ...],
    bits_range: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Codes and the scales' bits, block by block the best of the plain ones and those `steps` away."""
    codes, bits_NB = codes.clone(), bits_NB.clone()
    block_weights = weight_NK.shape[1] // bits_NB.shape[1]
    for rows in row_chunks(weight_NK):
        blocks = weight_NK[rows].float().unflatten(1, (-1, block_weights))
        plain = bits_NB[rows].clone()
        unit = scale(plain)  # errors are taken in it: squares of tiny weights would vanish

        def trial(
            bits: Tensor, blocks: Tensor = blocks, unit: Tensor = unit
        ) -> tuple[Tensor, Tensor]:  # of one chunk
            step = scale(bits)
            found = e2m1.encode((blocks / step[:, :, None]).flatten(1))
            values = e2m1.decode(found, torch.float32).view_as(blocks)
            error = values * (step / unit)[:, :, None] - blocks / unit[:, :, None]
            return found.view(*bits.shape, -1), error.square().sum(-1)

        best, least = trial(plain)
        for step in steps:
            bits = (plain.int() + step).clamp(*bits_range).to(torch.uint8)
            found, error = trial(bits)
            is_better = error < least
            least = torch.where(is_better, error, least)
            best = torch.where(is_better[:, :, None], found, best)
            bits_NB[rows] = torch.where(is_better, bits, bits_NB[rows])
        codes[rows] = cast(Tensor, best).flatten(1)
    return codes, bits_NB
