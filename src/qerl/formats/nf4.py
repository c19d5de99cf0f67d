"""NF4: 4-bit codes for 16 quantiles of a normal distribution, with a quantized scale per 64 weights.

    a = max |block|     q = the level nearest to W / a     a ~ dynamic[c] * m + mean(a)     W ~ levels[q] * a

    codes          uint8 [N, K / 2]         high nibble = even k
    absmax_codes   uint8 [N * K / 64]       indices into the dynamic map, row by row
    absmax_scales  float32 [.. / 256]       m: max |a - mean(a)| of 256 blocks; the last group may be shorter
    absmax_offset  float32 []               mean(a)

This is QLoRA's double quantization, bit for bit that of bitsandbytes' CPU build (tests/formats/test_nf4.py),
which rounds (a - mean) / m to a grid of 65,536 points before it takes the nearest of the map's 256 values.
The last bit of the mean, which torch computes, depends on the device. The scales vary along K, so the operand
includes them, rounded to its dtype.
"""

import dataclasses
import functools
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from qerl.errors import UserError
from qerl.formats.packed import PackedWeight, largest_magnitude, look_up_pairs, row_chunks

BLOCK_WEIGHTS = 64
GROUP_BLOCKS = 256
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_GRID_STEPS = (1 << 16) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class NF4(PackedWeight):
    """codes [[0xF7, ...]], absmax_codes [255], absmax_scales [0.5], absmax_offset 1.5: W[0, :2] = 2, 0."""

    name: ClassVar[str] = "nf4"
    bytes_per_weight: ClassVar[float] = 0.5 + 1 / BLOCK_WEIGHTS + 4 / (BLOCK_WEIGHTS * GROUP_BLOCKS)

    codes: Tensor
    absmax_codes: Tensor
    absmax_scales: Tensor
    absmax_offset: Tensor

    def __post_init__(self):
        n, k = self.shape
        num_blocks = n * k // BLOCK_WEIGHTS
        assert self.codes.dtype == self.absmax_codes.dtype == torch.uint8
        assert self.absmax_codes.shape == (num_blocks,) and k % BLOCK_WEIGHTS == 0
        assert self.absmax_scales.shape == (-(-num_blocks // GROUP_BLOCKS),)
        assert self.absmax_scales.dtype == self.absmax_offset.dtype == torch.float32

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        largest_magnitude(weight_NK, cls.name, BLOCK_WEIGHTS)
        (n, k), device = weight_NK.shape, weight_NK.device
        codes = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
        absmax = torch.empty(n, k // BLOCK_WEIGHTS, dtype=torch.float32, device=device)
        for rows in row_chunks(weight_NK):
            blocks = weight_NK[rows].float().unflatten(1, (-1, BLOCK_WEIGHTS))
            absmax[rows] = blocks.abs().amax(-1)
            inverse = absmax[rows].clamp(min=1e-38).reciprocal()
            codes[rows] = _nearest_levels((blocks * inverse[:, :, None]).flatten(1))
        offset = absmax.mean()
        if not offset.isfinite():
            raise UserError(f"nf4: the sum of the block maxima overflows in a weight of shape [{n}, {k}]")
        return cls(codes, *_quantize_absmax(absmax.flatten() - offset), offset)

    def operand(self, dtype: torch.dtype) -> Tensor:
        n, k = self.shape
        absmax_NB = self.absmax()
        out = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        pairs = _pairs(self.codes.device)
        for rows in row_chunks(out):
            values = look_up_pairs(self.codes[rows], pairs).unflatten(1, (-1, BLOCK_WEIGHTS))
            out[rows] = values.mul_(absmax_NB[rows, :, None]).flatten(1)
        return out

    def absmax(self) -> Tensor:
        """Return the scale of each block, fp32 [N, K / 64]."""
        group = self.absmax_scales.repeat_interleave(GROUP_BLOCKS)[: len(self.absmax_codes)]
        absmax = dynamic_map(self.codes.device).index_select(0, self.absmax_codes.int()) * group
        return (absmax + self.absmax_offset).view(self.shape[0], -1)


def _nearest_levels(normal_NK: Tensor) -> Tensor:
    """Return codes uint8 [N, K / 2]; a tie goes to the lower level."""
    levels = torch.tensor(LEVELS)
    codes = torch.zeros(normal_NK.shape, dtype=torch.uint8, device=normal_NK.device)
    for middle in ((levels[:-1] + levels[1:]) / 2).tolist():
        codes += normal_NK > middle
    return (codes[:, 0::2] << 4) | codes[:, 1::2]


def _quantize_absmax(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices into the dynamic map and the scale of each group of 256."""
    padding = -len(centered) % GROUP_BLOCKS
    groups = F.pad(centered, (0, padding)).view(-1, GROUP_BLOCKS)
    scales = groups.abs().amax(1)
    normal = groups * scales.clamp(min=3e-39).reciprocal()[:, None]  # below this the reciprocal overflows
    grid_index = ((normal + 1) * 0.5 * _GRID_STEPS + 0.5).int()
    codes = _codes_on_grid(centered.device)[grid_index]
    codes[scales == 0] = 0
    return codes.flatten()[: len(centered)], scales


@functools.cache
def dynamic_map(device: torch.device) -> Tensor:
    """Return 256 ascending values: per sign 2^e evenly spaced ones in decade e of 7; and 0 and 1."""
    decades = []
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        decades.append(10.0 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2))
    positive = torch.cat(decades)
    return torch.cat([-positive.flip(0), torch.zeros(1), positive, torch.ones(1)]).to(device)


@functools.cache
def _codes_on_grid(device: torch.device) -> Tensor:
    """Return uint8 [65536]: the map's nearest index for each point of an even grid over [-1, 1]."""
    values = dynamic_map(torch.device("cpu"))
    middles = 0.5 * (values[:-1] + values[1:])
    steps = torch.arange(_GRID_STEPS + 1, dtype=torch.float32)
    points = 2 * steps / torch.tensor(float(_GRID_STEPS)) - 1
    return torch.bucketize(points, middles).to(torch.uint8).to(device)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Return float32 [256, 2]: the two levels of every byte."""
    levels = torch.tensor(LEVELS, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1)
