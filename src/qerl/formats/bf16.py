"""BF16: the weight itself in bfloat16, the baseline for the other formats.

W ~ bfloat16(W)

weight  bfloat16 [N, K]   the caller's tensor, not a copy, if it is bfloat16 already
"""

import dataclasses
from typing import ClassVar, Self

import torch
from torch import Tensor

from qerl.formats.packed import PackedWeight, largest_magnitude, row_chunks


@dataclasses.dataclass(frozen=True, eq=False)
class BF16(PackedWeight):
    name: ClassVar[str] = "bf16"
    bytes_per_weight: ClassVar[float] = 2.0

    weight: Tensor

    def __post_init__(self):
        assert self.weight.dtype == torch.bfloat16 and self.weight.ndim == 2

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        largest_magnitude(weight_NK, cls.name, block_weights=1)
        if weight_NK.dtype == torch.bfloat16:
            return cls(weight_NK)
        out = torch.empty(weight_NK.shape, dtype=torch.bfloat16, device=weight_NK.device)
        largest = torch.finfo(torch.bfloat16).max
        for rows in row_chunks(weight_NK):
            out[rows] = weight_NK[rows].float().clamp(-largest, largest)
        return cls(out)

    def operand(self, dtype: torch.dtype) -> Tensor:
        """Return the weight; for bfloat16 this is the stored tensor, not a copy."""
        return self.weight.to(dtype)
