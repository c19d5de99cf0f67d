"""MXFP4: E2M1 codes and a power-of-two scale per 32 weights along K.

    e = floor(log2(max |block| * 8/7)) - 2     q = e2m1(W / 2^e)     W ~ q * 2^e

    codes   uint8 [N, K / 2]    low nibble = even k
    scales  uint8 [N, K / 32]   E8M0: e + 127

Encoding equals compressed-tensors' `mxfp4-pack-quantized` bit for bit (tests/formats/test_mxfp4.py). The
factor 8/7 is theirs; the OCP specification has none and would encode a largest weight of 1.9 as 1.5, not 2.
Their scale overflows at max |block| >= 1.75 * 2^127; here e is then 125, so every weight decodes to a finite
number.
"""

import dataclasses
from typing import ClassVar, Self

import torch
from torch import Tensor

from qerl.formats import e2m1
from qerl.formats.packed import PackedWeight, largest_magnitude, row_chunks

BLOCK_WEIGHTS = 32
_LARGEST_SCALE = 125 + 127


@dataclasses.dataclass(frozen=True, eq=False)
class MXFP4(PackedWeight):
    """codes [[0x72, ...]], scales [[125, ...]]: W[0, 0] = 1 / 4, W[0, 1] = 6 / 4."""

    name: ClassVar[str] = "mxfp4"
    bytes_per_weight: ClassVar[float] = 0.5 + 1 / BLOCK_WEIGHTS

    codes: Tensor
    scales: Tensor

    def __post_init__(self):
        n, k = self.shape
        assert self.codes.dtype == self.scales.dtype == torch.uint8
        assert self.scales.shape == (n, k // BLOCK_WEIGHTS) and k % BLOCK_WEIGHTS == 0

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        largest_magnitude(weight_NK, cls.name, BLOCK_WEIGHTS)
        (n, k), device = weight_NK.shape, weight_NK.device
        codes = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(n, k // BLOCK_WEIGHTS, dtype=torch.uint8, device=device)
        for rows in row_chunks(weight_NK):
            blocks = weight_NK[rows].float().unflatten(1, (-1, BLOCK_WEIGHTS))
            scales[rows] = _block_scales(blocks)
            scaled = blocks / _powers_of_two(scales[rows], torch.float32)[:, :, None]
            codes[rows] = e2m1.encode(scaled.flatten(1))
        return cls(codes, scales)

    def operand(self, dtype: torch.dtype) -> Tensor:
        n, k = self.shape
        out = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        for rows in row_chunks(out):
            scale = _powers_of_two(self.scales[rows], dtype).repeat_interleave(BLOCK_WEIGHTS, dim=1)
            torch.mul(e2m1.decode(self.codes[rows], dtype), scale, out=out[rows])
        return out


def _block_scales(blocks_NB32: Tensor) -> Tensor:
    """Return uint8 [N, B]. Adding a quarter of a binade carries into the exponent from 7/8 of a binade on."""
    bits = blocks_NB32.abs().amax(-1).view(torch.int32)
    return (((bits + (1 << 21)) >> 23) - 2).clamp(0, _LARGEST_SCALE).to(torch.uint8)


def _powers_of_two(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.view(torch.float8_e8m0fnu).to(dtype)
