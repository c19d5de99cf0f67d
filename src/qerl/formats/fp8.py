"""FP8: E4M3 codes and a float32 scale per block of 128 x 128 weights; blocks at the edges are smaller.

    s = max |block| / 448     q = e4m3(W / s)     W ~ q * s

    codes   float8_e4m3fn [N, K]
    scales  float32 [ceil(N / 128), ceil(K / 128)]   a multiplier; 1 where a block is zero

The scales vary along K, so the operand includes them, rounded to its dtype. A code has four significant bits.
If a scale has no more than that (`encode_exact`), their product is exact in bfloat16.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from qerl.formats.packed import PackedWeight, largest_magnitude, row_chunks

BLOCK = 128
_MAX_CODE = 448.0
_UNIT = 1 << 20  # a float32 whose bits are a multiple of this has four significant bits


@dataclasses.dataclass(frozen=True, eq=False)
class FP8(PackedWeight):
    """codes [[448., 1.5, ...]], scales [[0.5, ...]]: W[0, 0] = 224, W[0, 1] = 0.75."""

    name: ClassVar[str] = "fp8"
    bytes_per_weight: ClassVar[float] = 1 + 4 / BLOCK**2

    codes: Tensor
    scales: Tensor

    def __post_init__(self):
        n, k = self.shape
        assert self.codes.dtype == torch.float8_e4m3fn and self.scales.dtype == torch.float32
        assert self.scales.shape == (-(-n // BLOCK), -(-k // BLOCK))

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        return cls._encode(weight_NK, _block_scales)

    @classmethod
    def encode_exact(cls, weight_NK: Tensor) -> Self:
        """Encode with scales rounded up to four significant bits."""
        return cls._encode(weight_NK, _short_block_scales)

    @classmethod
    def _encode(cls, weight_NK: Tensor, scales_of: Callable[[Tensor], Tensor]) -> Self:
        largest_magnitude(weight_NK, cls.name, block_weights=1)
        (n, k), device = weight_NK.shape, weight_NK.device
        codes = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(-(-n // BLOCK), -(-k // BLOCK), dtype=torch.float32, device=device)
        for rows in row_chunks(weight_NK, multiple=BLOCK):
            block_rows = _block_rows(rows)
            weight = weight_NK[rows].float()
            scales[block_rows] = scales_of(weight)
            scaled = weight / _spread(scales[block_rows], weight.shape)
            # A subnormal scale can be too small, and some versions of torch cast numbers above 448 to NaN.
            codes[rows] = scaled.clamp_(-_MAX_CODE, _MAX_CODE).to(torch.float8_e4m3fn)
        return cls(codes, scales)

    def operand(self, dtype: torch.dtype) -> Tensor:
        n, k = self.shape
        out = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        for rows in row_chunks(out, multiple=BLOCK):
            codes = self.codes[rows].float()
            out[rows] = codes.mul_(_spread(self.scales[_block_rows(rows)], codes.shape))
        return out


def _block_rows(rows: slice) -> slice:
    return slice(rows.start // BLOCK, -(-rows.stop // BLOCK))


def _block_scales(weight_NK: Tensor) -> Tensor:
    n, k = weight_NK.shape
    padded = F.pad(weight_NK, (0, -k % BLOCK, 0, -n % BLOCK))
    largest = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
    scales = largest / torch.full_like(largest, _MAX_CODE)
    return scales.masked_fill(scales == 0, 1.0)


def _short_block_scales(weight_NK: Tensor) -> Tensor:
    bits = _block_scales(weight_NK).view(torch.int32)
    return (bits + (_UNIT - 1)).bitwise_and_(-_UNIT).view(torch.float32)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Repeat each block's scale for each of its weights."""
    across = scales.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]
    return across.repeat_interleave(BLOCK, dim=0)[: shape[0]]
