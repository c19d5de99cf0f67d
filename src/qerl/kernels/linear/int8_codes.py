"""Rotation and rounding of the factors of products of 8-bit integers (int8_product.py has the definition).

    rows      codes and maxima of x [T, S], one of each row, by one kernel
    Rotation  the maxima of a weight f W [N, K], which are found once, and its codes by them

A weight is rotated along its rows n, for the sums over them in a backward pass, or along k, for those of a
forward pass. It is read from tiles as they are (WeightTiles), or from an operand.

On a GPU codes are stored as the product's copies read them (kernels/linear/int8_layout.cuh), and the stored
maxima are
8 times as large. Elsewhere codes are plain, [T, S] and [outputs, S].
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.runtime import row_kernel
from qerl.kernels.runtime.architectures import num_sms
from qerl.kernels.tiles.nvfp4_tile import TILE_K, TILE_ROWS
from qerl.kernels.tiles.tile_layout import TileLayout

NEIGHBORS = 64
DEPTH, ROWS, COLUMNS = 128, 128, 256  # of int8_layout.cuh
_FILE, _WEIGHT_THREADS, _MAX_ROW_THREADS = "int8_codes.cu", 256, 800
_MAX_DEPTH = (2**31 - 1) // 127**2  # of a sum of products of integers in 32 bits
_TAIL = DEPTH // 2  # columns of a block in bfloat16


class WeightTiles(NamedTuple):
    """A weight in tiles."""

    tiles: Tensor
    factors_N: Tensor
    """fp32, the multiplier of each row of the tiles once it is decoded."""
    layout: TileLayout
    in_turns: bool
    """Gate and up take turns, 8 rows each."""

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    @property
    def shape(self) -> tuple[int, int]:
        return TILE_ROWS * self.tiles.shape[0], TILE_K * self.tiles.shape[1]


Weight = Tensor | WeightTiles
"""An operand, bf16 on a GPU, or tiles."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Rotation:
    """The factors and divisors of a weight, which are the same in all passes."""

    factors_N: Tensor
    """fp32, f, in the operand's order."""
    maxima: Tensor
    """fp32 [K], or along k [N]; on a GPU in the order of the product's columns and 8 times as large."""
    shape: tuple[int, int]
    along_k: bool
    """Its rows are then gate's, followed by up's."""

    @classmethod
    def of(cls, weight: Weight, factors_N: Tensor, *, along_k: bool = False) -> "Rotation":
        n, k = weight.shape
        assert factors_N.shape == (n,) and factors_N.dtype == torch.float32
        assert k % NEIGHBORS == n % 16 == 0 if along_k else can_rotate(n, k)
        if not _on_gpu(weight):
            maxima = _rotated_weight(weight, factors_N, along_k).abs().amax(1).float()
            return cls(factors_N, maxima, (n, k), along_k)
        maxima = torch.zeros(_num_columns(n, k, along_k), device=factors_N.device)
        rotation = cls(factors_N, maxima, (n, k), along_k)
        _rotate_weight(weight, None, rotation)
        return rotation

    def codes(self, weight: Weight) -> Tensor:
        """Return the weight's codes, int8."""
        assert weight.shape == self.shape
        if not _on_gpu(weight):
            return rounded(_rotated_weight(weight, self.factors_N, self.along_k), self.maxima)
        size = code_bytes(*self.shape, along_k=self.along_k)
        codes = torch.empty(size, dtype=torch.int8, device=self.maxima.device)
        _rotate_weight(weight, codes, self)
        return codes


class RotatedWeight(NamedTuple):
    codes: Tensor
    rotation: Rotation


def rotated_rows(x_TS: Tensor, u_TR: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes of x in bfloat16, 8 times its maxima, and u as the product reads it."""
    T, n = x_TS.shape
    assert row_kernel.are_vectors(x_TS) and n <= _MAX_DEPTH
    codes = torch.empty(row_code_bytes(T, n), dtype=torch.int8, device=x_TS.device)
    maxima_T = torch.empty(T, device=x_TS.device)
    rank, u_stride, u_lines = 0, 0, None
    if u_TR is not None:
        if not row_kernel.are_vectors(u_TR):
            u_TR = torch.nn.functional.pad(u_TR, (0, -u_TR.shape[1] % 8)).contiguous()
        rank, u_stride = u_TR.shape[1], u_TR.stride(0)
        size = _padded(T, ROWS) * num_tail_blocks(rank) * DEPTH
        u_lines = torch.empty(size, dtype=torch.int8, device=x_TS.device)
    threads, vectors = _row_threads(n)
    kernel = row_kernel.kernel(_FILE, "rotate_rows", x_TS.device, THREADS=threads, VECTORS=vectors)
    sizes = T, n, x_TS.stride(0), _padded(n, DEPTH) // DEPTH, rank, u_stride, num_tail_blocks(rank)
    max_ctas = kernel.resident_ctas(threads) * num_sms(x_TS.device)
    parameters = x_TS, u_TR, codes, u_lines, maxima_T, *sizes
    kernel.launch(grid=min(T, max_ctas), block_threads=threads, parameters=parameters)
    return codes, maxima_T, u_lines


def adapter_lines(lines_MR: Tensor, factors_M: Tensor | None, features: int) -> Tensor:
    """Return the adapter's part of the second factor, bf16 of any strides, as the product reads it: lines
    times their factors. features: the width of gate and of up, if the lines are theirs; else 0."""
    M, rank = lines_MR.shape
    assert lines_MR.dtype == torch.bfloat16 and (factors_M is None or factors_M.dtype == torch.float32)
    blocks = num_tail_blocks(rank)
    size = (2 * _padded(features, COLUMNS // 2) if features else _padded(M, COLUMNS)) * blocks * DEPTH
    placed = torch.empty(size, dtype=torch.int8, device=lines_MR.device)
    kernel = row_kernel.kernel(_FILE, "place_lines", lines_MR.device)
    parameters = lines_MR, factors_M, placed, M, rank, *lines_MR.stride(), blocks, features
    grid = -(-M // 256) * blocks * (_TAIL // 8)
    kernel.launch(grid=grid, block_threads=256, parameters=parameters)
    return placed


def can_rotate(out_width: int, in_width: int) -> bool:
    """True if [N, K] has whole groups of neighbors and rows that the kernels can read."""
    return out_width % NEIGHBORS == 0 and in_width % 8 == 0


def num_tail_blocks(rank: int) -> int:
    """Return the number of blocks of an adapter's part."""
    return -(-rank // _TAIL)


def row_code_bytes(rows: int, width: int) -> int:
    """Return the bytes of the codes of these rows."""
    return _padded(rows, ROWS) * _padded(width, DEPTH)


def code_bytes(out_width: int, in_width: int, *, along_k: bool = False) -> int:
    """Return the bytes of a weight's codes."""
    depth = in_width if along_k else out_width
    return _num_columns(out_width, in_width, along_k) * _padded(depth, DEPTH)


def hadamard(device: torch.device) -> Tensor:
    """Return R, float64 [64, 64]."""
    h = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(h) < NEIGHBORS:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / NEIGHBORS**0.5


def rotated(x_TS: Tensor) -> Tensor:
    """Return x R in float64."""
    return (x_TS.double().unflatten(1, (-1, NEIGHBORS)) @ hadamard(x_TS.device)).flatten(1)


def rounded(x_TS: Tensor, maxima_T: Tensor) -> Tensor:
    inverse_T = torch.where(maxima_T > 0, 127.0 / maxima_T.double(), 0.0)
    return (x_TS * inverse_T[:, None]).round().clamp(-127, 127).to(torch.int8)


def _on_gpu(weight: Weight) -> bool:
    if isinstance(weight, WeightTiles):
        assert row_kernel.on_gpu(weight.tiles), "tiles are read by a kernel"
        return True
    assert not row_kernel.on_gpu(weight) or row_kernel.are_vectors(weight)
    return row_kernel.on_gpu(weight)


def _rotated_weight(weight: Weight, factors_N: Tensor, along_k: bool) -> Tensor:
    assert isinstance(weight, Tensor)
    w_NK = factors_N[:, None] * weight.double()
    return rotated(w_NK if along_k else w_NK.T)


def _padded(n: int, block: int) -> int:
    return -(-n // block) * block


def _num_columns(n: int, k: int, along_k: bool) -> int:
    """Return the columns of the product's tiles: along k, those of gate and of up in halves of tiles."""
    return 2 * _padded(n // 2, COLUMNS // 2) if along_k else _padded(k, COLUMNS)


def _rotate_weight(weight: Weight, codes: Tensor | None, rotation: Rotation) -> None:
    """Fill in the codes, or without them the maxima."""
    n, k = weight.shape
    if isinstance(weight, WeightTiles):
        source, factors_N, layout, in_turns = weight
        format, stride = layout.define, 0
    else:
        source, factors_N, in_turns = weight, rotation.factors_N, False
        format, stride = -1, weight.stride(0)
    along_k = int(rotation.along_k)
    defines = {"FORMAT": format, "ALONG_K": along_k, "MAXIMA": int(codes is None), "IN_TURNS": int(in_turns)}
    kernel = row_kernel.kernel(_FILE, "rotate_weight", source.device, **defines)
    features = n // 2 if in_turns or rotation.along_k else 0
    kernel.launch(
        grid=-(-n // 128) * -(-k // 64),
        block_threads=_WEIGHT_THREADS,
        parameters=(source, factors_N, codes, rotation.maxima, n, k, stride, features),
    )


def _row_threads(n: int) -> tuple[int, int]:
    """Return a CTA's threads, whole warps, and how many times 16 numbers each has."""
    units = _padded(n, DEPTH) // 16
    vectors = -(-units // _MAX_ROW_THREADS)
    return _padded(-(-units // vectors), 32), vectors
