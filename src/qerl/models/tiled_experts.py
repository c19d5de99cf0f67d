"""Stacks of 4-bit experts in the decode kernels' tiles: the only copy, which decode steps read as they are.

    tiles        uint8 [E, N / 64, K / 64, 2304]    gate | up: rows of an expert in `swiglu_order`
    factors_EN   fp32, in the order of the tiles    scales   as PackedGroup has them, in the weight's order

Every other pass unpacks one expert for its product (kernels/experts/grouped_linear.py), rows in the order in
which they were stored. As for linears (packed_linear.py) the permutation is exact, except that codes become
0 where a block's scale is 0: tests/models/test_tiled_experts.py.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from qerl.formats import MXFP4, NVFP4, PackedWeight
from qerl.formats.stack import PackedStack, WeightStack
from qerl.kernels.tiles import tile_unpack
from qerl.kernels.tiles.nvfp4_decode import TILE_BYTES, TILE_K, TILE_ROWS
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.mixture import ExpertLinear
from qerl.models.packed.packed_linear import can_tile, tile_group


class ExpertRows(enum.Enum):
    """The rows of an expert's weight outside the tiles."""

    PLAIN = enum.auto()
    GATE_UP = enum.auto()
    """All of gate, then all of up."""
    ALTERNATING = enum.auto()
    """Gate 0, up 0, gate 1, ..."""

    def split(self, x_N: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of gate and of up, or all rows alone."""
        if self is ExpertRows.PLAIN:
            return (x_N,)
        return tuple(x_N.chunk(2)) if self is ExpertRows.GATE_UP else (x_N[::2], x_N[1::2])

    @property
    def in_tiles(self) -> UnpackRows:
        return UnpackRows.ALL if self is ExpertRows.PLAIN else UnpackRows.GATE_UP

    def join(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Invert `split`."""
        if self is ExpertRows.ALTERNATING:
            return torch.stack(parts, 1).flatten(0, 1)
        return torch.cat(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class TiledExpert(PackedWeight):
    """One expert of a TiledStack; its tensors are views."""

    name: ClassVar[str] = "tiled expert"
    bytes_per_weight: ClassVar[float] = NVFP4.bytes_per_weight

    tiles: Tensor
    scale: Tensor
    rows: ExpertRows

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        """Return an expert in NVFP4, its rows in their own order."""
        group = tile_group([NVFP4.encode(weight_NK)], UnpackRows.ALL)
        return cls(group.tiles, group.scales[0], ExpertRows.PLAIN)

    @property
    def alpha(self) -> Tensor:  # type: ignore[override]
        """One number for NVFP4, whose global scale is a divisor; one for each row for MXFP4."""
        return self.scale.reciprocal().squeeze(0) if len(self.scale) == 1 else self.scale

    @property
    def shape(self) -> tuple[int, int]:
        return TILE_ROWS * self.tiles.shape[0], TILE_K * self.tiles.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        return {"tiles": self.tiles, "scale": self.scale}

    def operand(self, dtype: torch.dtype) -> Tensor:
        if self.rows is not ExpertRows.ALTERNATING:
            return tile_unpack.unpack(self.tiles, self.rows.in_tiles, dtype)
        n, k = self.shape
        out_F2K = torch.empty(n // 2, 2, k, dtype=dtype, device=self.tiles.device)
        for place, rows in enumerate((UnpackRows.GATE, UnpackRows.UP)):
            tile_unpack.unpack(self.tiles, rows, dtype, out=out_F2K[:, place])
        return out_F2K.view(n, k)


@dataclasses.dataclass(frozen=True, eq=False)
class TiledStack(WeightStack):
    """The experts of one linear: stack[e] unpacks one of them."""

    tiles: Tensor
    factors_EN: Tensor
    scales: Tensor
    """NVFP4's global scales [E, 1], or MXFP4's multipliers of the rows [E, N]."""
    rows: ExpertRows

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: int) -> PackedWeight:
        return TiledExpert(self.tiles[index], self.scales[index], self.rows)

    def tensors(self) -> dict[str, Tensor]:
        return {"tiles": self.tiles, "factors_EN": self.factors_EN, "scales": self.scales}

    @functools.cached_property
    def alpha_E(self) -> Tensor:
        return self.scales.reciprocal()[:, 0] if self.scales.shape[1] == 1 else self.scales

    def unpack_chosen(self, chosen_G: Tensor, out: Tensor, times_alpha: bool = False) -> None:
        """Write the operands of the chosen weights to out [G, N, K]; times_alpha: with the factors of their
        rows, powers of two."""
        _, n, k = out.shape
        tiles = self.tiles.flatten(0, 1)
        factors_N = self.factors_EN.flatten() if times_alpha else None
        settings: Any = {"weight_rows": n, "factors_N": factors_N, "chosen_G": chosen_G}
        if self.rows is ExpertRows.ALTERNATING:
            for place, rows in enumerate((UnpackRows.GATE, UnpackRows.UP)):
                to = out.view(-1, 2, k)[:, place]
                tile_unpack.unpack(tiles, rows, out.dtype, out=to, **settings)
        else:
            tile_unpack.unpack(tiles, self.rows.in_tiles, out.dtype, out=out.view(-1, k), **settings)


def tile_experts(experts: ExpertLinear, rows: ExpertRows) -> bool:
    """Put a stack into tiles, expert by expert; return False if its format or shape does not fit."""
    stack = experts.weight
    assert stack is not None
    if isinstance(stack, TiledStack):
        return True
    tiled = tiled_stack(len(stack), stack.__getitem__, rows)
    if tiled is not None:
        experts.load_weight(tiled)
    return tiled is not None


def stacked(num: int, weight_of: Callable[[int], PackedWeight], rows: ExpertRows | None) -> WeightStack:
    """Stack the weights that weight_of makes: in tiles if rows are given and all of them fit, else as they
    are. A weight may be made again."""
    tiled = None if rows is None else tiled_stack(num, weight_of, rows)
    return PackedStack.of(num, map(weight_of, range(num))) if tiled is None else tiled


def tiled_stack(num: int, weight_of: Callable[[int], PackedWeight], rows: ExpertRows) -> TiledStack | None:
    """Return the weights in tiles, made one at a time; None as soon as one does not fit.

    Each tensor of the stack is allocated once and before anything that is freed again: plain stacks that
    come and go layer by layer leave PyTorch's allocator with 0.4 GB in pieces for each layer of
    gpt-oss-120b."""
    first = weight_of(0)
    if not _has_tiles(first, rows):
        return None
    (n, k), device = first.shape, next(iter(first.tensors().values())).device
    num_scales = n if isinstance(first, MXFP4) else 1
    tiles = torch.empty(num, n // TILE_ROWS, k // TILE_K, TILE_BYTES, dtype=torch.uint8, device=device)
    factors_EN, scales = (torch.empty(num, width, device=device) for width in (n, num_scales))
    for index in range(num):
        weight = first if index == 0 else weight_of(index)
        parts = _split(weight, rows)
        if type(weight) is not type(first) or not can_tile(parts, rows.in_tiles):
            return None
        group = tile_group(parts, rows.in_tiles)
        tiles[index], factors_EN[index] = group.tiles, group.factors_N
        scales[index] = group.scales[0] if isinstance(weight, NVFP4) else rows.join(group.scales)
    return TiledStack(tiles, factors_EN, scales, rows)


def _has_tiles(weight: PackedWeight, rows: ExpertRows) -> bool:
    """True if weights of this format and shape may fit into tiles."""
    (n, k), width = weight.shape, 64 if rows is ExpertRows.PLAIN else 32
    is_whole = k % TILE_K == n % TILE_ROWS == n // (64 // width) % width == 0
    return is_whole and isinstance(weight, NVFP4 | MXFP4)


def rows_of_gate_up(is_alternating: bool) -> ExpertRows:
    return ExpertRows.ALTERNATING if is_alternating else ExpertRows.GATE_UP


def in_tile_order(bias_EN: Tensor, rows: ExpertRows) -> Tensor:
    """Return biases in the order of the tiles' rows, fp32."""
    if rows is ExpertRows.PLAIN:
        return bias_EN.float()
    gate_FE, up_FE = rows.split(bias_EN.float().T)
    both = torch.stack((gate_FE.unflatten(0, (-1, 8)), up_FE.unflatten(0, (-1, 8))), 1)
    return both.flatten(0, 2).T.contiguous()


def _split(weight: PackedWeight, rows: ExpertRows) -> list[NVFP4 | MXFP4]:
    """Return gate and up of an expert, or all its rows; nothing of other formats."""
    if isinstance(weight, NVFP4):
        parts = zip(rows.split(weight.codes), rows.split(weight.scales.view(torch.uint8)), strict=True)
        return [
            NVFP4(codes, scales.view(torch.float8_e4m3fn), weight.global_scale)
            for codes, scales in ((c.contiguous(), s.contiguous()) for c, s in parts)
        ]
    if isinstance(weight, MXFP4):
        parts = zip(rows.split(weight.codes), rows.split(weight.scales), strict=True)
        return [MXFP4(codes.contiguous(), scales.contiguous()) for codes, scales in parts]
    return []
