"""Tiles of 64 rows x 64 k of a weight, one after the other along k: how a format's words lie in memory.

    lane 4 g + t of warp w reads rows 16 w + g and + 8 at k = 16 j + 2 t + {0, 1, 8, 9}, j = 0 .. 3, as the
    first operand of mma.sync: pairs of (row g, k), (row g + 8, k), (row g, k + 8), (row g + 8, k + 8)

    NVFP4   nvfp4_decode.py has the layout
    NF4     codes  uint8 [4 warps, 32 lanes, 4 j, 4]       a byte has two neighbors in k, the even one low
            scales fp32 [4 warps, 8 g, 2]                  the block's maximum of rows g and g + 8
    FP8     codes  uint8 [4 warps, 2, 32 lanes, 2 j, 8]    E4M3
            scales fp32 [2, 2]                             * 2^120, of rows g and g + 8; stored twice
    INT8    codes  int8 [4 warps, 2, 32 lanes, 2 j, 8]     the row's scale is a factor of the product

A code is decoded to fp32, multiplied by its scale, and rounded to bfloat16: the same operations as the
format's `operand`, so the bits are the same (kernels/tiles/tile_block.cuh,
tests/kernels/tiles/test_code_tiles.py). An E4M3 code placed at the top of a float is 2^-120 of its value;
2^120 is in the scale, so all products are exact until the one rounding that `operand` makes too. Scales of
2^7 and more therefore do not fit. From Ada on E4M3 codes are converted by an instruction, two at once, and
2^120 is taken off the scale again.
"""

import enum

import torch
from torch import Tensor

from qerl.formats.nf4 import LEVELS
from qerl.kernels.tiles.nvfp4_tile import TILE_K, TILE_ROWS

FP8_FACTOR = 2.0**120
MAX_FP8_SCALE = 2.0**7


class TileLayout(enum.Enum):
    """Value: (FORMAT of the CUDA sources, bytes of a tile, bytes of its codes)."""

    NVFP4 = (0, 2304, 2048)
    NF4 = (1, 2304, 2048)
    FP8 = (2, 4112, 4096)
    INT8 = (3, 4096, 4096)

    @property
    def define(self) -> int:
        return self.value[0]

    @property
    def tile_bytes(self) -> int:
        return self.value[1]

    @property
    def code_bytes(self) -> int:
        return self.value[2]


def pack(codes_NK: Tensor, scales: Tensor | None, layout: TileLayout) -> Tensor:
    """Return tiles uint8 [N / 64, K / 64, tile_bytes] of codes uint8 [N, K], one in each byte.

    scales: fp32 [N, K / 64]; of FP8 the same for all rows of a tile that are g, and for those that are g + 8;
    None for INT8.
    """
    n, k = codes_NK.shape
    assert codes_NK.dtype == torch.uint8 and n % TILE_ROWS == k % TILE_K == 0
    # rows: n64, warp, row half, g; k: k64, j, k half, t, pair
    each = codes_NK.view(n // 64, 4, 2, 8, k // 64, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    if layout is TileLayout.NF4:
        codes = each[..., 0] | (each[..., 1] << 4)
    else:  # n64, k64, warp, g, t, [2 of j], j, ...
        codes = each.unflatten(5, (2, 2)).permute(0, 1, 2, 5, 3, 4, 6, 7, 8, 9)
    codes = codes.reshape(n // 64, k // 64, layout.code_bytes)
    if scales is None:
        return codes.contiguous()
    assert scales.dtype == torch.float32 and scales.shape == (n, k // 64)
    scales = scales.view(n // 64, 4, 2, 8, k // 64).permute(0, 4, 1, 3, 2)  # n64, k64, warp, g, row half
    if layout is TileLayout.FP8:
        scales = scales[:, :, 0, :2] * FP8_FACTOR
    return torch.cat((codes, scales.flatten(2).contiguous().view(torch.uint8)), dim=-1)


def unpack(tiles: Tensor, layout: TileLayout) -> tuple[Tensor, Tensor | None]:
    """Return (codes, scales) as given to `pack`."""
    rows, columns = tiles.shape[:2]
    assert tiles.dtype == torch.uint8 and tiles.shape[2] == layout.tile_bytes
    codes = tiles[..., : layout.code_bytes]
    if layout is TileLayout.NF4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1)
        each = codes.view(rows, columns, 4, 8, 4, 4, 2, 2, 2)
    else:
        each = codes.reshape(rows, columns, 4, 2, 8, 4, 2, 2, 2, 2).permute(0, 1, 2, 4, 5, 3, 6, 7, 8, 9)
        each = each.flatten(5, 6)
    codes_NK = each.permute(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(rows * 64, columns * 64)
    if layout is TileLayout.INT8:
        return codes_NK, None
    scales = tiles[..., layout.code_bytes :].contiguous().view(torch.float32)
    if layout is TileLayout.FP8:
        scales = (scales[..., None, None, :2] / FP8_FACTOR).expand(-1, -1, 4, 8, -1)
    scales = scales.reshape(rows, columns, 4, 8, 2)
    return codes_NK, scales.permute(0, 2, 4, 3, 1).reshape(rows * 64, columns)


def operand(codes_NK: Tensor, scales: Tensor | None, layout: TileLayout, dtype: torch.dtype) -> Tensor:
    """Return what the format's own `operand` does, [N, K] in dtype."""
    if scales is None:
        return codes_NK.view(torch.int8).to(dtype)
    if layout is TileLayout.NF4:
        levels = torch.tensor(LEVELS, device=codes_NK.device)
        values = levels.index_select(0, codes_NK.flatten().int()).view(codes_NK.shape)
    else:
        values = codes_NK.view(torch.float8_e4m3fn).float()
    return values.mul_(scales.repeat_interleave(TILE_K, dim=1)).to(dtype)
