"""Unpack a weight from tiles: out[n, k] = code[n, k] * scale[n, k / 16], exact in bfloat16.

    tiles   uint8 [N / 64, K / 64, 2304]    nvfp4_decode.py has the layout
    out     bfloat16 or fp32 [N, K]; rows may have a larger stride

For products of more tokens than the decode kernel supports: unpack once, then multiply with cuBLAS. Rows are
returned in the weight's original order: for a weight packed in `swiglu_order` as [gate, up], or only the
gate's or the up's. It moves 2.56 bytes per weight at 89 to 91 % of a copy's bandwidth (7B shapes, H200);
with more tiles in flight per warp at 77 to 87 %.
"""

import enum

import torch
from torch import Tensor

from qerl.formats import NVFP4
from qerl.kernels import nvfp4_decode, row_kernel
from qerl.kernels.nvfp4_decode import TILE_BYTES, TILE_K, TILE_ROWS

CASES = ((64, 64), (192, 576), (448, 1216), (1152, 3584))  # N, K


class UnpackRows(enum.Enum):
    """The rows to unpack, and their order in the tiles."""

    ALL = enum.auto()
    GATE_UP = enum.auto()  # a weight in `swiglu_order`, returned as [gate, up]
    GATE = enum.auto()
    UP = enum.auto()


def reference(tiles: Tensor, rows: UnpackRows) -> Tensor:
    """The definition in float64, from plain codes and scales."""
    return _plain_operand(tiles, rows, torch.float32).double()


def num_rows(tiles: Tensor, rows: UnpackRows) -> int:
    return TILE_ROWS * len(tiles) // (2 if rows in (UnpackRows.GATE, UnpackRows.UP) else 1)


def unpack(tiles: Tensor, rows: UnpackRows, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """Return the operand [N, K], written to `out` if given."""
    assert tiles.dtype == torch.uint8 and tiles.shape[2] == TILE_BYTES and tiles.is_contiguous()
    shape = num_rows(tiles, rows), TILE_K * tiles.shape[1]
    if not tiles.is_cuda or dtype != torch.bfloat16:
        plain = _plain_operand(tiles, rows, dtype)
        return plain if out is None else out.copy_(plain)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=tiles.device)
    assert out.shape == shape and row_kernel.are_vectors(out)
    step, features = 16 if rows is UnpackRows.ALL else 8, shape[0] // 2
    first, second = {
        UnpackRows.ALL: (0, 8),
        UnpackRows.GATE_UP: (0, features),
        UnpackRows.GATE: (0, -1),
        UnpackRows.UP: (-1, 0),
    }[rows]
    kernel = row_kernel.kernel("nvfp4_unpack.cu", "nvfp4_unpack", tiles.device)
    kernel.launch(
        grid=len(tiles) * -(-tiles.shape[1] // 2),
        block_threads=256,
        parameters=(tiles, out, tiles.shape[1], out.stride(0), step, first, second),
    )
    return out


def plain(tiles: Tensor, rows: UnpackRows) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) as given to `nvfp4_decode.pack`, in the weight's original row order."""
    codes, scales = nvfp4_decode.unpack(tiles)
    if rows is UnpackRows.ALL:
        return codes, scales
    parts = (_halves(codes), _halves(scales.view(torch.uint8)))
    if rows is UnpackRows.GATE_UP:
        codes, scales = (torch.cat(halves) for halves in parts)
    else:
        codes, scales = (halves[rows is UnpackRows.UP] for halves in parts)
    return codes, scales.view(torch.float8_e4m3fn)


def _halves(x_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows in `swiglu_order` into gate and up."""
    gate, up = x_NB.view(-1, 2, 8, x_NB.shape[1]).unbind(1)
    return gate.reshape(-1, x_NB.shape[1]), up.reshape(-1, x_NB.shape[1])


def _plain_operand(tiles: Tensor, rows: UnpackRows, dtype: torch.dtype) -> Tensor:
    codes, scales = plain(tiles, rows)
    return NVFP4(codes, scales, torch.ones(1, device=tiles.device)).operand(dtype)
