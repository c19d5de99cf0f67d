"""Choose the block scales of four-bit float formats by least squared error.

    s_b = the candidate with the least sum over block b of (q(w / s) * s - w)^2

    NVFP4   the plain E4M3 scale, the 3 below it and the 5 above: 0.75 to 1.5 times, so that the largest
            weight may be clipped, or become 4 instead of 6
    MXFP4   the plain power of two, half of it and twice it

The plain scale is a candidate and wins ties, so no block's error exceeds that of plain rounding
(tests/formats/test_block_scale.py). The global scale does not change, so linears can still share it.
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
"""The bits of the smallest and the largest positive E4M3 number; bits ascend with the value."""
_E8M0_RANGE = 0, 252


def least_squares(packed: PackedWeight, weight_NK: Tensor) -> PackedWeight:
    """Return weight_NK with searched scales. `packed` is its plain encoding, in NVFP4 or MXFP4."""
    if isinstance(packed, NVFP4):
        return _nvfp4(packed, weight_NK)
    assert isinstance(packed, MXFP4), packed
    return _mxfp4(packed, weight_NK)


def _nvfp4(packed: NVFP4, weight_NK: Tensor) -> NVFP4:
    bits_NB = packed.scales.view(torch.uint8)

    def scale(bits: Tensor) -> Tensor:
        return bits.view(torch.float8_e4m3fn).float() / packed.global_scale

    codes, bits = _search(packed.codes, bits_NB, weight_NK, scale, _NVFP4_STEPS, _E4M3_RANGE)
    return NVFP4(codes, bits.view(torch.float8_e4m3fn), packed.global_scale)


def _mxfp4(packed: MXFP4, weight_NK: Tensor) -> MXFP4:
    def scale(bits: Tensor) -> Tensor:
        return bits.view(torch.float8_e8m0fnu).float()

    return MXFP4(*_search(packed.codes, packed.scales, weight_NK, scale, _MXFP4_STEPS, _E8M0_RANGE))


def _search(
    codes: Tensor,
    bits_NB: Tensor,
    weight_NK: Tensor,
    scale: Callable[[Tensor], Tensor],
    steps: tuple[int, ...],
    bits_range: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return codes and scale bits: for each block the best of the plain scale and those `steps` away."""
    codes, bits_NB = codes.clone(), bits_NB.clone()
    block_weights = weight_NK.shape[1] // bits_NB.shape[1]
    for rows in row_chunks(weight_NK):
        blocks = weight_NK[rows].float().unflatten(1, (-1, block_weights))
        plain = bits_NB[rows].clone()
        unit = scale(plain)  # errors are in this unit: squares of tiny weights would underflow

        def trial(bits: Tensor, blocks: Tensor = blocks, unit: Tensor = unit) -> tuple[Tensor, Tensor]:
            step = scale(bits)
            trial_codes = e2m1.encode((blocks / step[:, :, None]).flatten(1))
            values = e2m1.decode(trial_codes, torch.float32).view_as(blocks)
            error = values * (step / unit)[:, :, None] - blocks / unit[:, :, None]
            return trial_codes.view(*bits.shape, -1), error.square().sum(-1)

        best, best_error = trial(plain)
        for step in steps:
            bits = (plain.int() + step).clamp(*bits_range).to(torch.uint8)
            trial_codes, error = trial(bits)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best = torch.where(is_better[:, :, None], trial_codes, best)
            bits_NB[rows] = torch.where(is_better, bits, bits_NB[rows])
        codes[rows] = cast(Tensor, best).flatten(1)
    return codes, bits_NB
