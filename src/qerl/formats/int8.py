"""INT8: integers in [-127, 127] and a float32 scale per output channel, symmetric about zero.

    s = max |row| / 127     q = round(W / s)     W ~ q * s

    codes   int8 [N, K]
    scales  float32 [N]   1 where a row is zero; used as alpha

A code has 7 bits and a sign, so the operand is exact in bfloat16.
"""

import dataclasses
import functools
from typing import ClassVar, Self

import torch
from torch import Tensor

from qerl.formats.packed import PackedWeight, largest_magnitude, row_chunks

_MAX_CODE = 127.0


@dataclasses.dataclass(frozen=True, eq=False)
class INT8(PackedWeight):
    """codes [[127, -3, ...]], scales [0.01, ...]: W[0, 0] = 1.27, W[0, 1] = -0.03."""

    name: ClassVar[str] = "int8"
    bytes_per_weight: ClassVar[float] = 1.0

    codes: Tensor
    scales: Tensor

    def __post_init__(self):
        assert self.codes.dtype == torch.int8 and self.codes.ndim == 2
        assert self.scales.dtype == torch.float32 and self.scales.shape == self.codes.shape[:1]

    @functools.cached_property
    def alpha(self) -> Tensor:
        return self.scales

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        largest_magnitude(weight_NK, cls.name, block_weights=1)
        (n, k), device = weight_NK.shape, weight_NK.device
        codes = torch.empty(n, k, dtype=torch.int8, device=device)
        scales = torch.empty(n, dtype=torch.float32, device=device)
        for rows in row_chunks(weight_NK):
            weight = weight_NK[rows].float()
            largest = weight.abs().amax(1)
            scale = largest / torch.full_like(largest, _MAX_CODE)
            scales[rows] = scale.masked_fill(scale == 0, 1.0)
            scaled = weight / scales[rows, None]
            codes[rows] = scaled.round_().clamp_(-_MAX_CODE, _MAX_CODE).to(torch.int8)
        return cls(codes, scales)

    def operand(self, dtype: torch.dtype) -> Tensor:
        return self.codes.to(dtype)
