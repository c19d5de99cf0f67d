"""E2M1, the four-bit float of NVFP4 and MXFP4, two per byte.

    code = sign * 8 + i    value = +-(0, 0.5, 1, 1.5, 2, 3, 4, 6)[i]    byte = code[even k] + 16 * code[odd k]

With a = |x| clamped to 6, i = min(round(2a), round(a) + 2, round(a / 2) + 4). Each term rounds on the grid of
one binade, the smallest is the right one, and rounding half to even gives the even code
(tests/formats/test_e2m1.py). On a CPU seven comparisons take 2.5 times as long, torch.bucketize 13 times.
"""

import functools

import torch
from torch import Tensor

from qerl.formats.packed import look_up_pairs

MAX = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def encode(scaled_NK: Tensor) -> Tensor:
    """Return codes uint8 [N, K / 2]. A negative number that rounds to zero keeps its sign; -0.0 loses it."""
    a = scaled_NK.abs().clamp_(max=MAX)
    coarse = (a * 0.5).round_().add_(4)
    middle = a.round().add_(2)
    fine = a.mul_(2).round_()
    codes = torch.minimum(fine, torch.minimum(middle, coarse)).to(torch.uint8)
    codes += (scaled_NK < 0).to(torch.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def nearest(size: Tensor) -> Tensor:
    """Return the magnitude nearest to each size, which is not negative; half to even, as `encode` rounds.

    Below 2 the grid's step is 1/2, in each binade above twice that. Adding 1.5 * 2^22 times the binade's
    first number and taking it off again rounds to a step: fewer operations than in `encode`."""
    clipped = size.clamp(max=MAX)
    binade = (clipped.view(torch.int32) & 0x7F80_0000).view(torch.float32).clamp_(min=1)
    rounder = binade.mul_(1.5 * 2**22)
    return clipped.add_(rounder).sub_(rounder)


def decode(codes_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [N, 2B], exact in bfloat16, float16 and float32."""
    return look_up_pairs(codes_NB, _pairs(dtype, codes_NB.device))


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [256, 2]: the two values of every byte."""
    values = torch.tensor(VALUES, dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)
