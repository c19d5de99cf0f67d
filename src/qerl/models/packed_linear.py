"""4-bit weights in the decode kernels' tiles, one tensor for the linears that multiply the same input.

    q | k | v     tiles [sum N / 64, K / 64, 2304], rows one after the other       o, down    the same, alone
    gate | up     tiles [2 F / 64, D / 64, 2304], rows in `swiglu_order`

Each linear's weight becomes a `PackedNVFP4` or `PackedMXFP4`, its share of a `PackedGroup`; the plain codes
and scales are freed. All passes read this one copy: a decode step reads the tiles, every other pass unpacks
them for one product (kernels/nvfp4_unpack.py). `project`, `project_swiglu` and `project_onto` multiply, in
any format.

The permutation is exact, except that codes become 0 where a block's scale is 0 (nvfp4_decode.py). On a CPU
outputs are bitwise the same before and after: tests/models/test_packed_linear.py.

MXFP4's codes are NVFP4's, and its powers of two are E4M3 numbers once each row has a factor of its own: 18
binades below the row's largest scale. So MXFP4 runs on the same kernels with the same values; the scale of a
block of 32 is stored twice (0.5625 bytes a weight for 0.53). A weight with smaller scales in a row stays as
it is.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from qerl.formats import MXFP4, NVFP4, PackedWeight
from qerl.kernels import nvfp4_decode, nvfp4_unpack, row_kernel
from qerl.kernels.fused_linear import (
    LinearPart,
    Operand,
    fused_linear,
    fused_swiglu,
    linear_onto,
    widened,
)
from qerl.kernels.nvfp4_decode import TILE_BYTES, TILE_K, TILE_ROWS
from qerl.kernels.nvfp4_unpack import UnpackRows
from qerl.kernels.swiglu import swiglu
from qerl.models.fused_weights import FusedBF16, fuse_weights
from qerl.models.linear import OperandGroup, QuantLinear

# Packing takes more than an int32 for each code: 16 Mi weights at a time take 0.5 GB beside the model.
_CHUNK_WEIGHTS = 1 << 24
_MOST_BINADES, _LEAST_BINADES = 8, 9  # E4M3 has the powers of two from 2^-9 to 2^8
_LEAST_EXPONENT, _MOST_EXPONENT = 32, 222  # of MXFP4's scales, biased: factors stay normal fp32 numbers


@dataclasses.dataclass(frozen=True, eq=False)
class PackedGroup:
    """tiles [18, 9, 2304], factors_N [1152], widths (576, 288, 288): q|k|v of K = 576 in one tensor."""

    tiles: Tensor
    factors_N: Tensor
    """`row_factors` of each row, in the order of the tiles."""
    scales: tuple[Tensor, ...]
    """fp32 of each linear: NVFP4's global scale [1], or MXFP4's multiplier of each row [N]."""
    widths: tuple[int, ...]
    """Outputs of each linear."""
    rows: UnpackRows
    """ALL, or GATE_UP for two linears in `swiglu_order`."""

    @property
    def in_width(self) -> int:
        return TILE_K * self.tiles.shape[1]

    def operand(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Unpack all linears, one after the other, [sum N, K]."""
        return nvfp4_unpack.unpack(self.tiles, self.rows, dtype, out=out)

    def part(self, index: int) -> tuple[Tensor, UnpackRows]:
        """Return one linear's tiles and which of their rows belong to it."""
        if self.rows is UnpackRows.GATE_UP:
            return self.tiles, (UnpackRows.GATE, UnpackRows.UP)[index]
        first = sum(self.widths[:index]) // TILE_ROWS
        return self.tiles[first : first + self.widths[index] // TILE_ROWS], UnpackRows.ALL


@dataclasses.dataclass(frozen=True, eq=False)
class PackedTiles(PackedWeight):
    """PackedNVFP4(group, index=1) of q|k|v: k's weight."""

    bytes_per_weight: ClassVar[float] = NVFP4.bytes_per_weight

    group: PackedGroup
    index: int

    def operand(self, dtype: torch.dtype) -> Tensor:
        return nvfp4_unpack.unpack(*self.group.part(self.index), dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.group.widths[self.index], self.group.in_width

    def tensors(self) -> dict[str, Tensor]:
        """Return the group's tensors, which its linears share."""
        group = self.group
        return {"tiles": group.tiles, "factors_N": group.factors_N, "scale": group.scales[self.index]}

    @property
    def num_bytes(self) -> int:
        """Bytes of its share of the tiles."""
        n, k = self.shape
        return n // TILE_ROWS * (k // TILE_K) * TILE_BYTES + 4 * n + self.group.scales[self.index].nbytes

    @abc.abstractmethod
    def plain(self) -> NVFP4 | MXFP4:
        """Return the weight in its own format."""

    def to(self, device: torch.device | str) -> Self:
        return type(self)(tile_group([self.plain().to(device)], UnpackRows.ALL), 0)


class PackedNVFP4(PackedTiles):
    name: ClassVar[str] = NVFP4.name

    @functools.cached_property
    def alpha(self) -> Tensor:
        return self.group.scales[self.index].reciprocal().squeeze(0)

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        return cls(tile_group([NVFP4.encode(weight_NK)], UnpackRows.ALL), 0)

    def plain(self) -> NVFP4:
        codes, scales = nvfp4_unpack.plain(*self.group.part(self.index))
        return NVFP4(codes, scales, self.group.scales[self.index])


class PackedMXFP4(PackedTiles):
    name: ClassVar[str] = MXFP4.name

    @functools.cached_property
    def alpha(self) -> Tensor:
        """One multiplier per row."""
        return self.group.scales[self.index]

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        return cls(tile_group([MXFP4.encode(weight_NK)], UnpackRows.ALL), 0)

    def plain(self) -> MXFP4:
        """Return the weight; a block of zeros gets the smallest scale."""
        codes, scales = nvfp4_unpack.plain(*self.group.part(self.index))
        exponents = _exponents(scales[:, ::2].float() * self.alpha[:, None])
        return MXFP4(codes, exponents)


def can_tile(weights: Sequence[PackedWeight | None], rows: UnpackRows) -> bool:
    """True if these weights of one input fit into tiles together."""
    if not all(isinstance(weight, NVFP4) for weight in weights) and not all(map(_fits_rows, weights)):
        return False
    shapes = [weight.shape for weight in weights if weight is not None]
    if rows is UnpackRows.GATE_UP:
        return shapes[0] == shapes[1] and shapes[0][0] % 32 == shapes[0][1] % TILE_K == 0
    return all(n % TILE_ROWS == k % TILE_K == 0 for n, k in shapes)


def tile_group(weights: Sequence[NVFP4 | MXFP4], rows: UnpackRows) -> PackedGroup:
    """Pack the weights into one group, some rows at a time."""
    assert can_tile(weights, rows)
    parts = [_tileable(weight) for weight in weights]
    widths, k = tuple(weight.shape[0] for weight in weights), weights[0].shape[1]
    device = weights[0].codes.device
    shape = sum(widths) // TILE_ROWS, k // TILE_K, TILE_BYTES
    tiles = torch.empty(shape, dtype=torch.uint8, device=device)
    step = max(_CHUNK_WEIGHTS // k // TILE_ROWS, 1) * TILE_ROWS
    if rows is UnpackRows.GATE_UP:
        gate, up = parts
        for start in range(0, widths[0], step):
            some = slice(start, start + step)
            codes = _alternating(gate.codes[some], up.codes[some])
            scales = _alternating(gate.scales(some).view(torch.uint8), up.scales(some).view(torch.uint8))
            _put(tiles, 2 * start, codes, scales.view(torch.float8_e4m3fn))
    else:
        first = 0
        for weight, n in zip(parts, widths, strict=True):
            for start in range(0, n, step):
                some = slice(start, start + step)
                _put(tiles, first + start, weight.codes[some], weight.scales(some))
            first += n
    factors = [nvfp4_decode.row_factors(w.alpha, n) for w, n in zip(parts, widths, strict=True)]
    factors_N = (
        torch.cat(factors) if rows is UnpackRows.ALL else _alternating(*(f[:, None] for f in factors))[:, 0]
    )
    return PackedGroup(tiles, factors_N.contiguous(), tuple(w.scale for w in parts), widths, rows)


def _exponents(powers: Tensor) -> Tensor:
    """Return E8M0 of powers of two, uint8; 0 of 0."""
    return (torch.frexp(powers).exponent - 1 + 127).mul_(powers > 0).to(torch.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class _Tileable:
    """A weight as the tiles store it."""

    codes: Tensor
    alpha: Tensor
    """The row's factor; fp32, one number or [N]."""
    scale: Tensor
    """As PackedGroup has it."""
    scales: Callable[[slice], Tensor]
    """float8_e4m3fn [rows, K / 16] of some rows."""


def _tileable(weight: NVFP4 | MXFP4) -> _Tileable:
    if isinstance(weight, NVFP4):
        return _Tileable(weight.codes, weight.alpha, weight.global_scale, weight.scales.__getitem__)
    alpha_N = _row_alpha(weight)

    def scales(rows: slice) -> Tensor:
        powers = weight.scales[rows].view(torch.float8_e8m0fnu).float() / alpha_N[rows, None]
        powers = powers * _is_used(weight, rows)
        return powers.to(torch.float8_e4m3fn).repeat_interleave(2, dim=1)

    return _Tileable(weight.codes, alpha_N, alpha_N, scales)


def _row_alpha(weight: MXFP4) -> Tensor:
    """Return fp32 [N]: each row's largest scale / 2^8, the largest power of two in E4M3."""
    used = weight.scales.int() * _is_used(weight, slice(None))
    largest = used.amax(1).clamp(min=_LEAST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - 127 - _MOST_BINADES)


def _is_used(weight: MXFP4, rows: slice) -> Tensor:
    """Return bool [rows, K / 32]: some code of the block is not a zero."""
    return (weight.codes[rows] & 0x77).unflatten(1, (-1, 16)).amax(-1) > 0


def _fits_rows(weight: PackedWeight | None) -> bool:
    """True for MXFP4 of whose rows each has its scales within the binades of E4M3."""
    if not isinstance(weight, MXFP4):
        return False
    used = _is_used(weight, slice(None))
    largest = (weight.scales.int() * used).amax(1)
    least = weight.scales.int().masked_fill(~used, 255).amin(1)
    is_wide = (largest - least > _MOST_BINADES + _LEAST_BINADES) | (largest > _MOST_EXPONENT)
    is_wide |= (least < _LEAST_EXPONENT) & (least < 255)
    return not bool(is_wide.any())


def _alternating(gate_FB: Tensor, up_FB: Tensor) -> Tensor:
    """Return the rows of both in `swiglu_order`."""
    return torch.stack((gate_FB.view(-1, 8, gate_FB.shape[1]), up_FB.view(-1, 8, up_FB.shape[1])), 1).flatten(
        0, 2
    )


def _put(tiles: Tensor, first_row: int, codes: Tensor, scales: Tensor) -> None:
    first = first_row // TILE_ROWS
    tiles[first : first + len(codes) // TILE_ROWS] = nvfp4_decode.pack(codes, scales)


def tile_linears(linears: Sequence[QuantLinear], rows: UnpackRows) -> bool:
    """Put the linears' weights into one tensor of tiles; return False if they do not fit."""
    weights = [linear.weight for linear in linears]
    if not can_tile(weights, rows):
        return False
    group = tile_group([weight for weight in weights if isinstance(weight, NVFP4 | MXFP4)], rows)
    kind = PackedNVFP4 if isinstance(weights[0], NVFP4) else PackedMXFP4
    for index, linear in enumerate(linears):
        linear.load_weight(kind(group, index))
    return True


def tiles_of(linears: Sequence[QuantLinear]) -> PackedGroup | None:
    """Return the group of exactly these linears in this order; None if their weights are not in tiles."""
    weights = [linear.weight for linear in linears]
    first = weights[0]
    if not isinstance(first, PackedTiles) or len(first.group.widths) != len(weights):
        return None
    for index, weight in enumerate(weights):
        if not isinstance(weight, PackedTiles) or weight.group is not first.group or weight.index != index:
            return None
    return first.group


def project(
    x_TK: Tensor, linears: Sequence[QuantLinear], *, gaps_are_free: bool = False
) -> tuple[Tensor, ...]:
    """Return each linear's y_TN: on a GPU one product for all of them, where their weights can be fused.

    gaps_are_free: x was made with `room` behind its rows, or with none.
    """
    group = _product_group(x_TK, linears)
    if group is None:
        return tuple(linear(x_TK) for linear in linears)
    parts = [_part(linear) for linear in linears]
    return fused_linear(x_TK, _operand(x_TK, group, linears), parts, gaps_are_free=gaps_are_free)


def project_swiglu(x_TK: Tensor, gate_up: Sequence[QuantLinear], *, room: int) -> Tensor:
    """Return silu(gate) * up, on a GPU with room for so many columns behind each row; x is as for `project`
    with gaps_are_free."""
    group = _product_group(x_TK, gate_up)
    if group is None:
        gate_TF, up_TF = (linear(x_TK) for linear in gate_up)
        return swiglu(gate_TF, up_TF, room=room)
    parts = [_part(linear) for linear in gate_up]
    return fused_swiglu(x_TK, _operand(x_TK, group, gate_up), parts, room=room, gaps_are_free=True)


def project_onto(h_TN: Tensor, x_TK: Tensor, linear: QuantLinear, *, gaps_are_free: bool = False) -> Tensor:
    """Return h + y in fp32, in the place of h."""
    group = _product_group(x_TK, (linear,))
    if group is None:
        return h_TN.add_(linear(x_TK))
    operand = _operand(x_TK, group, (linear,))
    return linear_onto(h_TN, x_TK, operand, _part(linear), gaps_are_free=gaps_are_free)


def _product_group(x_TK: Tensor, linears: Sequence[QuantLinear]) -> OperandGroup | None:
    """Return the linears' common operand; None where each is to multiply for itself."""
    if not _is_fused_on(x_TK.device) or any(x.is_unfused for x in linears):
        return None
    tiles = tiles_of(linears)
    if tiles is None:
        return fuse_weights(linears)
    return None if any(linear.is_resident for linear in linears) else tiles


def _is_fused_on(device: torch.device) -> bool:
    """True on a GPU; on a CPU each linear has a resident operand of its own."""
    return device.type == "cuda"


def _operand(x_TK: Tensor, group: OperandGroup, linears: Sequence[QuantLinear]) -> Operand:
    rank, columns = room(linears), group.in_width
    if isinstance(group, FusedBF16):
        assert columns + rank in (columns, group.wide_NC.shape[1]), "some adapters are on, some off"
        return lambda dtype, has_b: group.wide_NC[:, : columns + rank if has_b else columns]
    parts, unpacked = [_part(linear) for linear in linears], linears[0].unpacked
    num_rows, like = sum(part.width for part in parts), x_TK.new_empty(0)

    def unpack(dtype: torch.dtype, room: int) -> Tensor:
        return group.operand(dtype, row_kernel.rows(num_rows, columns, room, like, dtype) if room else None)

    def operand(dtype: torch.dtype, has_b: bool) -> Tensor:
        make = functools.partial(unpack, dtype, rank if has_b else 0)
        w_NK = make() if unpacked is None else unpacked.of(group, make)
        return widened(w_NK, parts) if has_b else w_NK

    return operand


def room(linears: Sequence[QuantLinear]) -> int:
    """Number of free columns behind each row of x with which `project` need not copy it."""
    return sum(linear.rank for linear in linears)


def _part(linear: QuantLinear) -> LinearPart:
    return LinearPart(linear.out_width, linear.alpha, linear.bias, linear.adapter, linear.is_read)
