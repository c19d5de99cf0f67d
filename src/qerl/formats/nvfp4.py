"""NVFP4: E2M1 codes, an E4M3 scale per 16 weights along K, and one float32 scale per weight matrix.

    g = 448 * 6 / max |W|     s = e4m3(g * max |block| / 6)     q = e2m1(W / (s / g))     W ~ q * s / g

    codes         uint8 [N, K / 2]            low nibble = even k
    scales        float8_e4m3fn [N, K / 16]   not negative
    global_scale  float32 [1]                 a divisor

Encoding equals compressed-tensors' `nvfp4-pack-quantized` bit for bit, so checkpoints can be exchanged in
both directions (tests/formats/test_nvfp4.py). Hence g is 1/max, rounded, times 2688, rounded, or 1 if that
overflows, and a block scale that would be 0 is 0.125. The operand is q * s without the float32 scale: 6
significant bits, exact in bfloat16 and float16. alpha is 1/g.
"""

import dataclasses
import functools
from typing import ClassVar, Self

import torch
from torch import Tensor

from qerl.formats import e2m1
from qerl.formats.packed import PackedWeight, largest_magnitude, row_chunks

BLOCK_WEIGHTS = 16
_MAX_SCALE = 448.0
_EMPTY_SCALE = 0.125


@dataclasses.dataclass(frozen=True, eq=False)
class NVFP4(PackedWeight):
    """codes [[0x72, ...]], scales [[448., ...]], global_scale [2688.]: W[0, 0] = 1/6, W[0, 1] = 1."""

    name: ClassVar[str] = "nvfp4"
    bytes_per_weight: ClassVar[float] = 0.5 + 1 / BLOCK_WEIGHTS

    codes: Tensor
    scales: Tensor
    global_scale: Tensor

    def __post_init__(self):
        n, k = self.shape
        assert self.codes.dtype == torch.uint8 and self.scales.dtype == torch.float8_e4m3fn
        assert self.scales.shape == (n, k // BLOCK_WEIGHTS) and k % BLOCK_WEIGHTS == 0
        assert self.global_scale.dtype == torch.float32 and self.global_scale.shape == (1,)

    @functools.cached_property
    def alpha(self) -> Tensor:
        return self.global_scale.reciprocal().squeeze(0)

    @classmethod
    def encode(cls, weight_NK: Tensor, largest: float | None = None) -> Self:
        """largest: sets the global scale, where weights share one; default: max |W|."""
        magnitude = largest_magnitude(weight_NK, cls.name, BLOCK_WEIGHTS)
        if largest is not None:
            magnitude.fill_(largest)
        smallest_normal = torch.finfo(torch.float32).tiny
        g = magnitude.clamp(min=smallest_normal).reciprocal() * (_MAX_SCALE * e2m1.MAX)
        g = g.nan_to_num(posinf=1.0)
        (n, k), device = weight_NK.shape, weight_NK.device
        codes = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(n, k // BLOCK_WEIGHTS, dtype=torch.float8_e4m3fn, device=device)
        for rows in row_chunks(weight_NK):
            blocks = weight_NK[rows].float().unflatten(1, (-1, BLOCK_WEIGHTS))
            scales[rows] = _block_scales(blocks, g)
            scaled = blocks / (scales[rows].float() / g)[:, :, None]
            codes[rows] = e2m1.encode(scaled.flatten(1))
        return cls(codes, scales, g.reshape(1))

    def operand(self, dtype: torch.dtype) -> Tensor:
        n, k = self.shape
        out = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        for rows in row_chunks(out):
            scale = self.scales[rows].to(dtype).repeat_interleave(BLOCK_WEIGHTS, dim=1)
            torch.mul(e2m1.decode(self.codes[rows], dtype), scale, out=out[rows])
        return out


def _block_scales(blocks_NB16: Tensor, g: Tensor) -> Tensor:
    """Return float8_e4m3fn [N, B]."""
    largest_NB = blocks_NB16.abs().amax(-1)
    scale = (g * (largest_NB / torch.full_like(g, e2m1.MAX))).to(torch.float8_e4m3fn).float()
    return scale.masked_fill(scale == 0, _EMPTY_SCALE).to(torch.float8_e4m3fn)
