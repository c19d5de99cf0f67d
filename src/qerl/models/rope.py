"""Rotary position embedding: each pair (j, j + H/2) of a head is rotated by an angle.

    angle_j = position * f_j        y_j         = m * (x_j cos - x_{j+H/2} sin)
                                    y_{j + H/2} = m * (x_{j+H/2} cos + x_j sin)

    default   f_j = theta ** (-2 j / H), m = 1
    linear    f_j / factor, m = 1
    llama3    f_j / factor for long wavelengths, f_j for short ones, a weighted mean between; m = 1
    yarn      as llama3, with limits in turns within the original length; m = 0.1 ln(factor) + 1

Angles and cosines are fp32; kernels/rotary.py rotates. Sources: Su et al. 2021 (default), Chen et al. 2023
(linear), the Llama 3.1 release (llama3), Peng et al. 2023 (yarn).
"""

import math

import torch
from torch import Tensor

from qerl.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Return f_j, fp32 [H / 2]."""
    f = 1.0 / rope.theta ** (torch.arange(0, head_size, 2).float() / head_size)
    if rope.kind == "linear":
        return f / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions * f / (2 * math.pi)  # within the original sequence
        kept = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
        return _interpolate(f, rope.factor, kept.clamp(0, 1))
    if rope.kind == "yarn":
        first, last = (_dimension(rope, head_size, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.is_truncated:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_size - 1)
        ramp = (torch.arange(head_size // 2) - first) / max(last - first, 0.001)
        return _interpolate(f, rope.factor, 1 - ramp.clamp(0, 1))
    assert rope.kind == "default"
    return f


def _interpolate(f: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Interpolate: f where kept is 1, f / factor where it is 0."""
    return f * kept + f / factor * (1 - kept)


def _dimension(rope: Rope, head_size: int, turns: float) -> float:
    """Return the j whose pair makes this many turns within the original length."""
    return head_size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def magnitude(rope: Rope) -> float:
    """Return m, the factor of cosine and sine."""
    if rope.kind != "yarn":
        return 1.0
    if rope.magnitude is not None:
        return rope.magnitude

    def yarn_magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope.mscale) / yarn_magnitude(rope.mscale_all_dim)
    return yarn_magnitude(1.0)


def cosine_sine(positions_T: Tensor, frequencies: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return (cosine, sine) for kernels/rotary.py, fp32 [T, 1, H]; the sine is negative in the first half."""
    angle = positions_T[:, None].float() * frequencies
    cosine, sine = angle.cos() * size, angle.sin() * size
    return torch.cat((cosine, cosine), -1)[:, None], torch.cat((-sine, sine), -1)[:, None]
