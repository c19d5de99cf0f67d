"""Unpack a weight from tiles: out[n, k] = code[n, k] * scale[n, k / block], as the format's `operand`.

    tiles   uint8 [N / 64, K / 64, bytes]   tile_layout.py has the layouts
    out     bfloat16 or fp32 [N, K]; rows may have a larger stride

For products of more tokens than the decode kernel supports: unpack once, then multiply with cuBLAS. Rows are
returned in the weight's original order: for a weight packed in `swiglu_order` as [gate, up], or only the
gate's or the up's. For NVFP4 it moves 2.56 bytes per weight at 89 to 91 % of a copy's bandwidth (7B shapes,
H200); with more tiles in flight per warp at 77 to 87 %.
"""

import enum

import torch
from torch import Tensor

from qerl.formats import NVFP4
from qerl.kernels.runtime import row_kernel
from qerl.kernels.tiles import nvfp4_decode, tile_layout
from qerl.kernels.tiles.nvfp4_tile import TILE_K, TILE_ROWS
from qerl.kernels.tiles.tile_layout import TileLayout

CASES = ((64, 64), (192, 576), (448, 1216), (1152, 3584))  # N, K


class UnpackRows(enum.Enum):
    """The rows to unpack, and their order in the tiles."""

    ALL = enum.auto()
    GATE_UP = enum.auto()  # a weight in `swiglu_order`, returned as [gate, up]
    GATE = enum.auto()
    UP = enum.auto()


def reference(tiles: Tensor, rows: UnpackRows, layout: TileLayout = TileLayout.NVFP4) -> Tensor:
    """The definition in float64, from plain codes and scales."""
    return _plain_operand(tiles, rows, layout, torch.float32).double()


def num_rows(tiles: Tensor, rows: UnpackRows) -> int:
    return TILE_ROWS * len(tiles) // (2 if rows in (UnpackRows.GATE, UnpackRows.UP) else 1)


def unpack(
    tiles: Tensor,
    rows: UnpackRows,
    dtype: torch.dtype,
    layout: TileLayout = TileLayout.NVFP4,
    *,
    out: Tensor | None = None,
    weight_rows: int | None = None,
    factors_N: Tensor | None = None,
    chosen_G: Tensor | None = None,
) -> Tensor:
    """Return the operand [N, K], written to `out` if given. weight_rows: the rows of one weight, of several
    below each other, each of which has gate and up of its own; None: it is one weight. factors_N: fp32 powers
    of two times 2^19 as nvfp4_decode.row_factors returns them, of NVFP4's rows in the order of the tiles;
    the rows are multiplied by these powers. chosen_G: int32, the weights to unpack, with weight_rows; None:
    all of them."""
    assert factors_N is None or (layout is TileLayout.NVFP4 and factors_N.shape == (TILE_ROWS * len(tiles),))
    assert tiles.dtype == torch.uint8 and tiles.shape[2] == layout.tile_bytes and tiles.is_contiguous()
    assert chosen_G is None or (weight_rows is not None and chosen_G.dtype == torch.int32)
    weight_tiles = len(tiles) if weight_rows is None else weight_rows // TILE_ROWS
    count = len(tiles) // weight_tiles if chosen_G is None else len(chosen_G)
    shape = count * num_rows(tiles[:weight_tiles], rows), TILE_K * tiles.shape[1]
    if not row_kernel.on_gpu(tiles) or dtype != torch.bfloat16:
        if chosen_G is not None:
            tiles = _picked(tiles, len(tiles) // weight_tiles, chosen_G)
            if factors_N is not None:
                factors_N = _picked(factors_N, len(factors_N) // (TILE_ROWS * weight_tiles), chosen_G)
        plain = torch.cat([_plain_operand(each, rows, layout, dtype) for each in tiles.chunk(count)])
        if factors_N is not None:
            powers_N1 = factors_N[:, None].to(dtype) / nvfp4_decode.ALPHA_FACTOR
            plain *= torch.cat([_rows_of(each, rows) for each in powers_N1.chunk(count)])
        return plain if out is None else out.copy_(plain)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=tiles.device)
    assert out.shape == shape and row_kernel.are_vectors(out)
    step, features = 16 if rows is UnpackRows.ALL else 8, shape[0] // count // 2
    jump = features if rows is UnpackRows.GATE_UP else 0
    first, second = {
        UnpackRows.ALL: (0, 8),
        UnpackRows.GATE_UP: (0, features),
        UnpackRows.GATE: (0, -1),
        UnpackRows.UP: (-1, 0),
    }[rows]
    defines, more = {"FORMAT": layout.define}, ()
    if factors_N is not None:
        assert factors_N.dtype == torch.float32 and factors_N.is_contiguous()
        defines, more = defines | {"FACTORS": 1}, (factors_N,)
    kernel = row_kernel.kernel("tile_unpack.cu", "tile_unpack", tiles.device, **defines)
    places = out.stride(0), step, first, second, features // 8, jump, chosen_G, weight_tiles
    kernel.launch(
        grid=count * weight_tiles * -(-tiles.shape[1] // 2),
        block_threads=256,
        parameters=(tiles, out, tiles.shape[1], *places, *more),
    )
    return out


def plain(tiles: Tensor, rows: UnpackRows) -> tuple[Tensor, Tensor]:
    """Return NVFP4's (codes, scales) as given to `nvfp4_decode.pack`, in the weight's original row order."""
    codes, scales = nvfp4_decode.unpack(tiles)
    return _rows_of(codes, rows), _rows_of(scales.view(torch.uint8), rows).view(torch.float8_e4m3fn)


def plain_codes(tiles: Tensor, rows: UnpackRows, layout: TileLayout) -> tuple[Tensor, Tensor | None]:
    """Return (codes, scales) as given to `tile_layout.pack`, in the weight's original row order."""
    codes, scales = tile_layout.unpack(tiles, layout)
    return _rows_of(codes, rows), None if scales is None else _rows_of(scales, rows)


def _rows_of(x_NB: Tensor, rows: UnpackRows) -> Tensor:
    """Return these of the rows in the tiles' order."""
    if rows is UnpackRows.ALL:
        return x_NB
    gate, up = (x.reshape(-1, x_NB.shape[1]) for x in x_NB.reshape(-1, 2, 8, x_NB.shape[1]).unbind(1))
    return torch.cat((gate, up)) if rows is UnpackRows.GATE_UP else up if rows is UnpackRows.UP else gate


def _picked(x: Tensor, num_weights: int, chosen_G: Tensor) -> Tensor:
    return x.unflatten(0, (num_weights, -1)).index_select(0, chosen_G.long()).flatten(0, 1)


def _plain_operand(tiles: Tensor, rows: UnpackRows, layout: TileLayout, dtype: torch.dtype) -> Tensor:
    if layout is not TileLayout.NVFP4:
        return tile_layout.operand(*plain_codes(tiles, rows, layout), layout, dtype)
    codes, scales = plain(tiles, rows)
    return NVFP4(codes, scales, torch.ones(1, device=tiles.device)).operand(dtype)
