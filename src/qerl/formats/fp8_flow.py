"""FP8 flow: FP8's codes and scales, for products whose activations are FP8 as well.

    y = Q(x) @ decode()^T        Q(x) = q * s, s = max |128 neighbors of a row| / 448, q = e4m3(x / s)

The granularity is that of DeepSeek-V3 and Jet-RL (arXiv 2601.14243): 128 x 128 weights, 1 x 128 activations.
Sampler and learner quantize the same numbers at the same points. kernels/linear/fp8_linear.py has the
product.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from qerl.formats.fp8 import BLOCK, FP8

MAX_CODE = 448.0


@dataclasses.dataclass(frozen=True, eq=False)
class FP8Flow(FP8):
    name: ClassVar[str] = "fp8-flow"


def quantize_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes e4m3 [T, K], scales fp32 [T, ceil(K / 128)]); a scale is 1 where a group is zero."""
    K = x_TK.shape[1]
    groups = F.pad(x_TK.float(), (0, -K % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = groups.abs().amax(2)
    scales = largest / torch.full_like(largest, MAX_CODE)
    scales = scales.masked_fill(scales == 0, 1.0)
    codes = (groups / scales[:, :, None]).clamp_(-MAX_CODE, MAX_CODE).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :K].contiguous(), scales


def rounded_rows(x_TK: Tensor) -> Tensor:
    """Return Q(x) in fp32."""
    codes, scales = quantize_rows(x_TK)
    return codes.float() * scales.repeat_interleave(BLOCK, dim=1)[:, : x_TK.shape[1]]
