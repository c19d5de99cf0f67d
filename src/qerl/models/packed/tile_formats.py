"""Weights as the decode kernels' tiles store them: which formats fit, with which codes, scales and factors.

packed_linear.py says what MXFP4's rows must have to become NVFP4's; tile_layout.py has the layouts.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from qerl.formats import FP8, INT8, MXFP4, NF4, NVFP4, PackedWeight
from qerl.formats.fp8 import BLOCK
from qerl.kernels.tiles import nvfp4_decode
from qerl.kernels.tiles.nvfp4_tile import TILE_K
from qerl.kernels.tiles.tile_layout import MAX_FP8_SCALE, TileLayout

_BINADES_ABOVE_1, _BINADES_BELOW_1 = 8, 9  # E4M3 has the powers of two from 2^-9 to 2^8
_MIN_EXPONENT, _MAX_EXPONENT = 32, 222  # of MXFP4's scales, biased: factors stay normal fp32 numbers


@dataclasses.dataclass(frozen=True, eq=False)
class TileParts:
    """A weight as the tiles store it."""

    layout: TileLayout
    factors: Tensor
    """The kernels' multiplier of the sums; fp32, one number or [N]."""
    scale: Tensor
    """As PackedGroup has it."""
    codes: Callable[[slice], Tensor]
    """uint8 of some rows, as `pack` of the layout takes them."""
    scales: Callable[[slice], Tensor]
    """The scales of some rows, likewise; [rows, 0] if the tiles have none."""


def fits_tiles(weight: PackedWeight | None) -> bool:
    """True if tiles can store the values of a weight of this format; its shape does not matter."""
    if isinstance(weight, MXFP4):
        return _fits_rows(weight)
    if type(weight) is FP8:  # not FP8Flow, whose products are of codes
        is_nan = (weight.codes.view(torch.uint8) & 0x7F) == 0x7F
        return not bool(is_nan.any() | (weight.scales.abs().max() >= MAX_FP8_SCALE))
    return isinstance(weight, NVFP4 | NF4 | INT8)


def tile_parts(weight: PackedWeight) -> TileParts:
    if isinstance(weight, NVFP4):
        factors = nvfp4_decode.row_factors(weight.alpha, 1)
        parts = (weight.codes.__getitem__, weight.scales.__getitem__)
        return TileParts(TileLayout.NVFP4, factors, weight.global_scale, *parts)
    if isinstance(weight, MXFP4):
        return _mxfp4(weight)
    if isinstance(weight, NF4):
        return _nf4(weight)
    if isinstance(weight, FP8):
        return _fp8(weight)
    assert isinstance(weight, INT8), weight
    codes, none = weight.codes.view(torch.uint8), weight.scales.new_empty(len(weight.codes), 0)
    return TileParts(TileLayout.INT8, weight.scales, weight.scales, codes.__getitem__, none.__getitem__)


def _nf4(weight: NF4) -> TileParts:
    def codes(rows: slice) -> Tensor:
        pairs = weight.codes[rows]
        return torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1)

    absmax_NB, one = weight.absmax(), weight.absmax_scales.new_ones(1)
    return TileParts(TileLayout.NF4, one, one, codes, absmax_NB.__getitem__)


def _fp8(weight: FP8) -> TileParts:
    codes, one = weight.codes.view(torch.uint8), weight.scales.new_ones(1)
    num_columns = weight.shape[1] // TILE_K
    scales_NB = weight.scales.repeat_interleave(BLOCK // TILE_K, dim=1)[:, :num_columns]

    def scales(rows: slice) -> Tensor:
        row = torch.arange(*rows.indices(weight.shape[0]), device=codes.device)
        return scales_NB[row // BLOCK]

    return TileParts(TileLayout.FP8, one, one, codes.__getitem__, scales)


def _mxfp4(weight: MXFP4) -> TileParts:
    alpha_N = _row_alpha(weight)

    def scales(rows: slice) -> Tensor:
        powers = weight.scales[rows].view(torch.float8_e8m0fnu).float() / alpha_N[rows, None]
        powers = powers * _is_used(weight, rows)
        return powers.to(torch.float8_e4m3fn).repeat_interleave(2, dim=1)

    factors = nvfp4_decode.row_factors(alpha_N, len(alpha_N))
    return TileParts(TileLayout.NVFP4, factors, alpha_N, weight.codes.__getitem__, scales)


def exponents(powers: Tensor) -> Tensor:
    """Return E8M0 of powers of two, uint8; 0 of 0."""
    return (torch.frexp(powers).exponent - 1 + 127).mul_(powers > 0).to(torch.uint8)


def _row_alpha(weight: MXFP4) -> Tensor:
    """Return fp32 [N]: each row's largest scale / 2^8, the largest power of two in E4M3."""
    used = weight.scales.int() * _is_used(weight, slice(None))
    largest = used.amax(1).clamp(min=_MIN_EXPONENT)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - 127 - _BINADES_ABOVE_1)


def _is_used(weight: MXFP4, rows: slice) -> Tensor:
    """Return bool [rows, K / 32]: some code of the block is not a zero."""
    return (weight.codes[rows] & 0x77).unflatten(1, (-1, 16)).amax(-1) > 0


def _fits_rows(weight: MXFP4) -> bool:
    """True if the scales of each row are within the binades of E4M3."""
    used = _is_used(weight, slice(None))
    largest = (weight.scales.int() * used).amax(1)
    smallest = weight.scales.int().masked_fill(~used, 255).amin(1)
    is_wide = (largest - smallest > _BINADES_ABOVE_1 + _BINADES_BELOW_1) | (largest > _MAX_EXPONENT)
    is_wide |= smallest < _MIN_EXPONENT
    return not bool(is_wide.any())
