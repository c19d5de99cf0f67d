"""Quantized weights in the decode kernels' tiles, one tensor for the linears that multiply the same input.

    q | k | v     tiles [sum N / 64, K / 64, bytes], rows one after the other      o, down    the same, alone
    gate | up     tiles [2 F / 64, D / 64, bytes], rows in `swiglu_order`

Each linear's weight becomes a `PackedTiles`, its share of a `PackedGroup`; the plain codes and scales are
freed. All passes read this one copy: a decode step reads the tiles, every other pass unpacks
them for one product (kernels/tiles/tile_unpack.py). `project`, `project_swiglu` and `project_onto` multiply,
in any format.

The permutation is exact, except that codes become 0 where a block's scale is 0 (nvfp4_decode.py). On a CPU
outputs are bitwise the same before and after: tests/models/packed/test_packed_linear.py.

NF4, FP8 and INT8 have layouts of their own (kernels/tiles/tile_layout.py), which decode to the operand's
bits. An NF4 block's maximum is stored as its fp32 value (0.5625 bytes a weight for 0.516): the kernels need
not decode it.

MXFP4's codes are NVFP4's, and its powers of two are E4M3 numbers once each row has a factor of its own: 18
binades below the row's largest scale. So MXFP4 runs on the same kernels with the same values; the scale of a
block of 32 is stored twice (0.5625 bytes a weight for 0.53). An operand includes the rows' factors, also
powers of two. A weight with smaller scales in a row stays as it is.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from qerl.formats import FORMATS, FP8, INT8, MXFP4, NF4, NVFP4, PackedWeight
from qerl.kernels.linear.fused_linear import (
    LinearPart,
    Operand,
    fused_linear,
    fused_swiglu,
    linear_onto,
    widened,
)
from qerl.kernels.linear.int8_codes import NEIGHBORS, WeightTiles
from qerl.kernels.pointwise.swiglu import swiglu
from qerl.kernels.runtime import row_kernel
from qerl.kernels.tiles import nvfp4_decode, tile_layout, tile_unpack
from qerl.kernels.tiles.nvfp4_tile import TILE_K, TILE_ROWS
from qerl.kernels.tiles.tile_layout import TileLayout
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.linear import OperandGroup, QuantLinear
from qerl.models.linear_pass import PLAIN, LinearPass, OperandCache
from qerl.models.packed.fused_weights import FusedBF16, fuse_weights
from qerl.models.packed.rotated_weight import is_rotated, rotated_operand
from qerl.models.packed.tile_formats import exponents, fits_tiles, tile_parts

# Packing takes more than an int32 for each code: 16 Mi weights at a time take 0.5 GB beside the model.
_CHUNK_WEIGHTS = 1 << 24


@dataclasses.dataclass(frozen=True, eq=False)
class PackedGroup:
    """tiles [18, 9, 2304], factors_N [1152], widths (576, 288, 288): q|k|v of K = 576 in one tensor."""

    tiles: Tensor
    factors_N: Tensor
    """The kernels' multiplier of each row's sum, in the order of the tiles."""
    scales: tuple[Tensor, ...]
    """fp32 of each linear: NVFP4's global scale [1], MXFP4's or INT8's multiplier of each row [N], else one
    [1]."""
    widths: tuple[int, ...]
    """Outputs of each linear."""
    rows: UnpackRows
    """ALL, or GATE_UP for two linears in `swiglu_order`."""
    layout: TileLayout = TileLayout.NVFP4

    @property
    def in_width(self) -> int:
        return TILE_K * self.tiles.shape[1]

    def operand(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Unpack all linears, one after the other, [sum N, K]."""
        return tile_unpack.unpack(
            self.tiles, self.rows, dtype, self.layout, out=out, factors_N=self.row_powers_N
        )

    @property
    def row_powers_N(self) -> Tensor | None:
        """MXFP4's factors, powers of two, which operands include."""
        is_mxfp4 = self.layout is TileLayout.NVFP4 and len(self.scales[0]) > 1
        return self.factors_N if is_mxfp4 else None

    @property
    def weight_tiles(self) -> WeightTiles | None:
        """The tiles as 8-bit integers are made from them; None: they cannot be."""
        in_turns = self.rows is UnpackRows.GATE_UP
        if not row_kernel.on_gpu(self.tiles) or (in_turns and self.widths[0] % NEIGHBORS):
            return None
        return WeightTiles(self.tiles, self.factors_N, self.layout, in_turns)

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
        (tiles, rows), powers_N = self.group.part(self.index), self.group.row_powers_N
        if powers_N is not None and rows is UnpackRows.ALL:
            powers_N = powers_N.split(self.group.widths)[self.index]
        return tile_unpack.unpack(tiles, rows, dtype, self.group.layout, factors_N=powers_N)

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
        tile_bytes = self.group.layout.tile_bytes
        return n // TILE_ROWS * (k // TILE_K) * tile_bytes + 4 * n + self.group.scales[self.index].nbytes

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        return cls(tile_group([FORMATS[cls.name].encode(weight_NK)], UnpackRows.ALL), 0)

    def to(self, device: torch.device | str) -> Self:
        return type(self)(tile_group([self.plain().to(device)], UnpackRows.ALL), 0)

    def plain(self) -> PackedWeight:
        """Return the weight in its own format."""
        raise NotImplementedError


class PackedNVFP4(PackedTiles):
    name: ClassVar[str] = NVFP4.name

    @functools.cached_property
    def alpha(self) -> Tensor:
        return self.group.scales[self.index].reciprocal().squeeze(0)

    def plain(self) -> NVFP4:
        codes, scales = tile_unpack.plain(*self.group.part(self.index))
        return NVFP4(codes, scales, self.group.scales[self.index])


class PackedMXFP4(PackedTiles):
    name: ClassVar[str] = MXFP4.name

    def plain(self) -> MXFP4:
        """Return the weight; a block of zeros gets the smallest scale."""
        codes, scales = tile_unpack.plain(*self.group.part(self.index))
        return MXFP4(codes, exponents(scales[:, ::2].float() * self.group.scales[self.index][:, None]))


class PackedCodes(PackedTiles):
    """A weight of a layout in tile_layout.py."""

    def to(self, device: torch.device | str) -> Self:
        codes, scales = tile_unpack.plain_codes(*self.group.part(self.index), self.group.layout)
        scale, layout = self.group.scales[self.index].to(device), self.group.layout
        tiles = tile_layout.pack(codes.to(device), None if scales is None else scales.to(device), layout)
        factors_N, widths = scale.expand(len(codes)).contiguous(), self.shape[:1]
        return type(self)(PackedGroup(tiles, factors_N, (scale,), widths, UnpackRows.ALL, layout), 0)


class PackedNF4(PackedCodes):
    name: ClassVar[str] = NF4.name
    bytes_per_weight: ClassVar[float] = TileLayout.NF4.tile_bytes / (TILE_ROWS * TILE_K)


class PackedFP8(PackedCodes):
    name: ClassVar[str] = FP8.name
    bytes_per_weight: ClassVar[float] = TileLayout.FP8.tile_bytes / (TILE_ROWS * TILE_K)


class PackedINT8(PackedCodes):
    name: ClassVar[str] = INT8.name
    bytes_per_weight: ClassVar[float] = INT8.bytes_per_weight

    @functools.cached_property
    def alpha(self) -> Tensor:
        """One multiplier per row."""
        return self.group.scales[self.index]


KINDS: dict[type[PackedWeight], type[PackedTiles]] = {
    NVFP4: PackedNVFP4,
    MXFP4: PackedMXFP4,
    NF4: PackedNF4,
    FP8: PackedFP8,
    INT8: PackedINT8,
}


def can_tile(weights: Sequence[PackedWeight | None], rows: UnpackRows) -> bool:
    """True if these weights of one input fit into tiles together."""
    if len({type(weight) for weight in weights}) != 1 or not all(map(fits_tiles, weights)):
        return False
    shapes = [weight.shape for weight in weights if weight is not None]
    if rows is UnpackRows.GATE_UP:
        return shapes[0] == shapes[1] and shapes[0][0] % 32 == shapes[0][1] % TILE_K == 0
    return all(n % TILE_ROWS == k % TILE_K == 0 for n, k in shapes)


def tile_group(weights: Sequence[PackedWeight], rows: UnpackRows) -> PackedGroup:
    """Pack the weights into one group, some rows at a time."""
    assert can_tile(weights, rows)
    parts = [tile_parts(weight) for weight in weights]
    layout = parts[0].layout
    widths, k = tuple(weight.shape[0] for weight in weights), weights[0].shape[1]
    device = parts[0].scale.device
    shape = sum(widths) // TILE_ROWS, k // TILE_K, layout.tile_bytes
    tiles = torch.empty(shape, dtype=torch.uint8, device=device)
    step = max(_CHUNK_WEIGHTS // k // TILE_ROWS, 1) * TILE_ROWS
    if rows is UnpackRows.GATE_UP:
        gate, up = parts
        for start in range(0, widths[0], step):
            some = slice(start, start + step)
            codes = _alternating(gate.codes(some), up.codes(some))
            scales = _alternating(*(part.scales(some).view(torch.uint8) for part in parts))
            _put(tiles, 2 * start, codes, scales, layout)
    else:
        first = 0
        for weight, n in zip(parts, widths, strict=True):
            for start in range(0, n, step):
                some = slice(start, start + step)
                _put(tiles, first + start, weight.codes(some), weight.scales(some), layout)
            first += n
    factors = [w.factors.expand(n) for w, n in zip(parts, widths, strict=True)]
    factors_N = torch.cat(factors) if rows is UnpackRows.ALL else _alternating(*factors)
    return PackedGroup(tiles, factors_N.contiguous(), tuple(w.scale for w in parts), widths, rows, layout)


def _alternating(gate_FB: Tensor, up_FB: Tensor) -> Tensor:
    """Return the rows of both in `swiglu_order`."""
    return torch.stack((gate_FB.unflatten(0, (-1, 8)), up_FB.unflatten(0, (-1, 8))), 1).flatten(0, 2)


def _put(tiles: Tensor, first_row: int, codes: Tensor, scales: Tensor, layout: TileLayout) -> None:
    first = first_row // TILE_ROWS
    if layout is TileLayout.NVFP4:
        packed = nvfp4_decode.pack(codes, scales.view(torch.float8_e4m3fn))
    else:
        packed = tile_layout.pack(codes, scales.view(torch.float32) if scales.numel() else None, layout)
    tiles[first : first + len(codes) // TILE_ROWS] = packed


def tile_linears(linears: Sequence[QuantLinear], rows: UnpackRows) -> bool:
    """Put the linears' weights into one tensor of tiles; return False if they do not fit."""
    weights = [linear.weight for linear in linears]
    if not can_tile(weights, rows):
        return False
    group = tile_group([weight for weight in weights if weight is not None], rows)
    kind = next(kind for plain, kind in KINDS.items() if isinstance(weights[0], plain))
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
    x_TK: Tensor,
    linears: Sequence[QuantLinear],
    linear_pass: LinearPass = PLAIN,
    *,
    gaps_are_free: bool = False,
) -> tuple[Tensor, ...]:
    """Return each linear's y_TN: on a GPU one product for all of them, where their weights can be fused.

    gaps_are_free: x was made with `room` behind its rows, or with none.
    """
    fused = _fused(x_TK, linears, linear_pass)
    if fused is None:
        return tuple(linear(x_TK, linear_pass) for linear in linears)
    return fused_linear(x_TK, *fused, gaps_are_free=gaps_are_free)


def project_swiglu(
    x_TK: Tensor, gate_up: Sequence[QuantLinear], linear_pass: LinearPass = PLAIN, *, room: int
) -> Tensor:
    """Return silu(gate) * up, on a GPU with room for this many columns behind each row; x is as for `project`
    with gaps_are_free."""
    fused = _fused(x_TK, gate_up, linear_pass)
    if fused is None:
        gate_TF, up_TF = (linear(x_TK, linear_pass) for linear in gate_up)
        return swiglu(gate_TF, up_TF, room=room)
    return fused_swiglu(x_TK, *fused, room=room, gaps_are_free=True)


def project_onto(
    h_TN: Tensor, x_TK: Tensor, linear: QuantLinear, linear_pass: LinearPass = PLAIN, *, gaps_are_free: bool
) -> Tensor:
    """Return h + y in fp32, in the place of h."""
    fused = _fused(x_TK, (linear,), linear_pass)
    if fused is None:
        return h_TN.add_(linear(x_TK, linear_pass))
    operand, (part,) = fused
    needed = linear_pass.needs_output
    return linear_onto(h_TN, x_TK, operand, part, gaps_are_free=gaps_are_free, needs_output=needed)


def _fused(
    x_TK: Tensor, linears: Sequence[QuantLinear], linear_pass: LinearPass
) -> tuple[Operand, list[LinearPart]] | None:
    """Return the linears' common operand and their parts; None where each is to multiply for itself."""
    if not _is_fused_on(x_TK) or any(x.is_unfused(linear_pass) for x in linears):
        return None
    tiles = tiles_of(linears)
    if tiles is not None and any(linear.is_resident for linear in linears):
        return None
    group = fuse_weights(linears) if tiles is None else tiles
    if group is None:
        return None
    parts = [LinearPart(x.out_width, x.alpha, x.bias, x.adapter) for x in linears]
    if not is_rotated(x_TK, group, linears, linear_pass):
        return _plain_operand(x_TK, group, parts, linear_pass.operands), parts
    weight_tiles = None if tiles is None else tiles.weight_tiles
    operands = linear_pass.operands
    if operands is not None and not operands.is_held and weight_tiles is not None:
        operands = None  # the backward pass does not read what a repeated forward pass unpacks
    operand = _plain_operand(x_TK, group, parts, operands)
    return rotated_operand(operand, group, weight_tiles, linears, linear_pass), parts


def _is_fused_on(x_TK: Tensor) -> bool:
    """True on a GPU; on a CPU each linear has a resident operand of its own."""
    return row_kernel.on_gpu(x_TK)


def _plain_operand(
    x_TK: Tensor, group: OperandGroup, parts: Sequence[LinearPart], unpacked: OperandCache | None
) -> Operand:
    rank, columns = sum(len(x.adapter.a_RK) for x in parts if x.adapter is not None), group.in_width
    if isinstance(group, FusedBF16):
        assert rank in (0, group.rank), "some adapters are on, some off"
        return lambda dtype, has_b: group.wide_NC[:, : columns + rank if has_b else columns]
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
