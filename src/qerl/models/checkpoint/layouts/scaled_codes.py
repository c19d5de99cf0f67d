"""Read weights W [N, K] that are FP8 or integer codes q times scales s, of any granularity.

    W[n, k] = (q[n, k] - z[n / R, j]) * s[n / R, j]      j = k / C, or group_index[k]

    per tensor    one scale          per channel   [N] or [N, 1]: R = 1, C = K
    per R x C     [N / R, K / C], rounded up; groups of C weights of a row have R = 1

What fits a format of ours keeps its codes: E4M3 with blocks that 128 x 128 divides, or with one scale, is
FP8; integers without zero points z, whose scales do not vary along K, are INT8. The rest is decoded to
float32.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl.formats import FP8, INT8, PackedWeight
from qerl.formats.fp8 import BLOCK
from qerl.formats.packed import row_chunks
from qerl.models.checkpoint.layouts.layout import (
    LayoutError,
    StoredWeight,
    TensorFolder,
    check_finite,
    read_part,
)

FP8_DTYPES = torch.float8_e4m3fn, torch.float8_e5m2
_FLOATS = torch.float32, torch.bfloat16, torch.float16
_EXPONENTS = torch.uint8, torch.float8_e8m0fnu
_NAMES = {torch.float8_e4m3fn: "FP8", torch.float8_e5m2: "FP8 (E5M2)", torch.int8: "INT8"}


@dataclasses.dataclass(frozen=True, slots=True)
class Granularity:
    """Granularity(128, 128): a scale for 128 x 128 weights. None: all rows, or all columns."""

    rows: int | None
    columns: int | None

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Return the shape of the scales."""
        return -(-n // (self.rows or n)), -(-k // (self.columns or k))

    def __str__(self) -> str:
        if self.columns is None:
            return "per tensor" if self.rows is None else "per channel"
        return f"per {self.columns}" if self.rows == 1 else f"per {self.rows} x {self.columns}"

    @classmethod
    def of_block(cls, sizes: Any) -> "Granularity | None":
        """Return Granularity(*sizes); None unless these are two positive integers."""
        is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
        return cls(*sizes) if is_pair and all(type(x) is int and x > 0 for x in sizes) else None

    def divides(self, block: int) -> bool:
        """True if no block of block x block weights has two scales."""
        return all(size is None or size % block == 0 for size in (self.rows, self.columns))


PER_TENSOR, PER_CHANNEL = Granularity(None, None), Granularity(1, None)


def matrix_shape(folder: TensorFolder, name: str) -> tuple[int, int]:
    shape = folder.shapes[name]
    if len(shape) != 2 or 0 in shape:
        raise LayoutError(f"{name} is {list(shape)}, must have two dimensions")
    return shape[0], shape[1]


def scaled_weight(
    folder: TensorFolder,
    codes: str,
    scales: str,
    granularity: Granularity,
    *,
    zero_points: str | None = None,
    input_factors: str | None = None,
) -> StoredWeight:
    """Return the weight of codes [N, K] in FP8 or INT8; scales in uint8 are E8M0 exponents. `input_factors`
    [K] multiply the layer's input, so the columns of the weight."""
    dtype = folder.dtypes[codes]
    if dtype not in _NAMES:
        raise LayoutError(f"{codes} must be an 8-bit float or integer, is {dtype}")
    shape = matrix_shape(folder, codes)
    format = None
    if zero_points is None and input_factors is None:
        if dtype == torch.float8_e4m3fn and granularity.divides(BLOCK):
            format = FP8.name
        elif dtype == torch.int8 and granularity.columns is None:
            format = INT8.name

    def read() -> PackedWeight | Tensor:
        codes_NK = read_part(folder, codes, dtype, shape)
        if dtype in FP8_DTYPES:
            for rows in row_chunks(codes_NK):
                check_finite(codes, codes_NK[rows])
        scales_RC = read_scales(folder, scales, granularity.grid(*shape))
        if format is not None:
            return _PACK[format](codes_NK, scales_RC, granularity)
        zeros_RC = None
        if zero_points is not None:
            zeros_RC = read_grid(folder, zero_points, (torch.int8,), granularity.grid(*shape)).float()
        weight_NK = decode(codes_NK, scales_RC, granularity, zeros_RC)
        if input_factors is not None:
            factors = read_part(folder, input_factors, _FLOATS, (shape[1],)).float()
            weight_NK.mul_(check_finite(input_factors, factors))
        return weight_NK

    parts = tuple(name for name in (codes, scales, zero_points, input_factors) if name)
    return StoredWeight(shape, f"{_NAMES[dtype]} {granularity}", format, parts, read)


def read_scales(folder: TensorFolder, name: str, grid: tuple[int, int]) -> Tensor:
    """Return finite scales in float32, of the grid's shape."""
    scales = read_grid(folder, name, (*_FLOATS, *_EXPONENTS), grid)
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    return check_finite(name, scales.float())


def read_grid(
    folder: TensorFolder, name: str, dtypes: tuple[torch.dtype, ...], grid: tuple[int, int]
) -> Tensor:
    """Read a tensor of the grid's shape, which may lack dimensions of size 1, or have more of them."""
    stored = folder.shapes.get(name, grid)
    if [size for size in stored if size != 1] != [size for size in grid if size != 1]:
        raise LayoutError(f"{name} is {list(stored)}, must be {list(grid)}")
    return read_part(folder, name, dtypes, stored).reshape(grid)


def decode(
    codes_NK: Tensor,
    scales_RC: Tensor,
    granularity: Granularity,
    zeros_RC: Tensor | None = None,
    group_index_K: Tensor | None = None,
) -> Tensor:
    """Return the weight in float32; `group_index_K` is the column of the scales for each k."""
    n, k = codes_NK.shape
    row_index_N = torch.arange(n) // (granularity.rows or n)
    if group_index_K is None:
        group_index_K = torch.arange(k) // (granularity.columns or k)
    out = torch.empty(n, k)
    for rows in row_chunks(out):
        out[rows] = codes_NK[rows]
        if zeros_RC is not None:
            out[rows] -= zeros_RC[row_index_N[rows]][:, group_index_K]
        out[rows] *= scales_RC[row_index_N[rows]][:, group_index_K]
    return out


def _pack_fp8(codes_NK: Tensor, scales_RC: Tensor, granularity: Granularity) -> FP8:
    """Repeat larger blocks' scales for the blocks of 128 x 128 that they hold."""
    (n, k), (rows, columns) = codes_NK.shape, (granularity.rows, granularity.columns)
    row_index = torch.arange(0, n, BLOCK) // (rows or n)
    column_index = torch.arange(0, k, BLOCK) // (columns or k)
    return FP8(codes_NK, scales_RC[row_index][:, column_index].contiguous())


def _pack_int8(codes_NK: Tensor, scales_RC: Tensor, granularity: Granularity) -> INT8:
    row_index_N = torch.arange(len(codes_NK)) // (granularity.rows or len(codes_NK))
    return INT8(codes_NK, scales_RC[row_index_N, 0])


def int8_weight(codes_NK: Tensor, zeros_N1: Tensor, scales_N1: Tensor) -> INT8:
    """Return the weight (q - z) s of codes whose differences from the zero points fit int8."""
    differences_NK = codes_NK.short() - zeros_N1.short()
    return INT8(differences_NK.to(torch.int8), scales_N1[:, 0].contiguous())


_PACK: dict[str, Callable[[Tensor, Tensor, Granularity], PackedWeight]] = {
    FP8.name: _pack_fp8,
    INT8.name: _pack_int8,
}


def packed_int_weight(
    folder: TensorFolder, module: str, bits: int, group: int | None, is_symmetric: bool
) -> StoredWeight:
    """Return a weight of compressed-tensors' pack-quantized: codes of 2, 4 or 8 bits along K in int32, lowest
    bits first, as q + 2^(bits - 1); zero points packed along N; `group` None: a scale per channel."""
    codes, scales, size = (f"{module}.weight_{x}" for x in ("packed", "scale", "shape"))
    n, k = _stored_size(folder, codes, size, bits)
    zeros, index = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
    granularity = Granularity(1, group)
    has_index = index in folder.shapes and group is not None
    format = INT8.name if group is None and (is_symmetric or bits < 8) else None
    optional = (zeros,) * (not is_symmetric) + (index,) * (index in folder.shapes)
    parts = (codes, scales, size, *optional)
    read = partial(_read_packed_int, folder, module, (n, k), bits, granularity, is_symmetric, has_index)
    return StoredWeight((n, k), f"int{bits} {granularity}", format, parts, read)


def _stored_size(folder: TensorFolder, codes: str, size: str, bits: int) -> tuple[int, int]:
    stored = read_part(folder, size, (torch.int64, torch.int32), (2,)).tolist()
    n, k = stored
    packed = matrix_shape(folder, codes)
    if min(n, k) <= 0 or packed != (n, -(-k * bits // 32)):
        raise LayoutError(f"{codes} is {list(packed)}, which {size} {stored} does not fit")
    return n, k


def _read_packed_int(
    folder: TensorFolder,
    module: str,
    shape: tuple[int, int],
    bits: int,
    granularity: Granularity,
    is_symmetric: bool,
    has_index: bool,
) -> PackedWeight | Tensor:
    codes, scales, zeros, index = (f"{module}.weight_{x}" for x in ("packed", "scale", "zero_point", "g_idx"))
    (n, k), grid = shape, granularity.grid(*shape)
    packed = read_part(folder, codes, torch.int32, folder.shapes[codes])
    codes_NK = _signed(packed, bits, k)
    scales_RC = read_scales(folder, scales, grid)
    zeros_RC = torch.zeros(grid, dtype=torch.int8)
    if not is_symmetric:
        packed = read_part(folder, zeros, torch.int32, (-(-n * bits // 32), grid[1]))
        zeros_RC = _signed(packed.T, bits, n).T
    if granularity.columns is None and (is_symmetric or bits < 8):
        return int8_weight(codes_NK, zeros_RC, scales_RC)
    group_index_K = read_group_index(folder, index, k, grid[1]) if has_index else None
    return decode(codes_NK, scales_RC, granularity, zeros_RC.float(), group_index_K)


def _signed(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of each row, int8, of codes that are stored as q + 2^(bits - 1)."""
    codes = unpack_int32(packed, bits)[:, :count]
    if bits == 8:  # flipping the sign bit subtracts 2^7
        return (codes.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)
    return codes - (1 << (bits - 1))


def read_group_index(folder: TensorFolder, name: str, k: int, num_groups: int) -> Tensor | None:
    """Return the group of each of K columns; None if the tensor is all -1: groups are in order."""
    index_K = read_part(folder, name, (torch.int32, torch.int64), (k,)).long()
    if (index_K == -1).all():
        return None
    if index_K.min() < 0 or index_K.max() >= num_groups:
        raise LayoutError(f"{name} holds groups outside 0 to {num_groups - 1}")
    return index_K


def unpack_int32(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of each int32, lowest bits first: int8 [N, 32 / bits * C] of int32 [N, C]. A code of 8
    bits wraps around, so that subtracting 2^7 wraps it back."""
    assert bits in (2, 4, 8)
    bytes_NB = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes = (bytes_NB[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1).view(torch.int8)
