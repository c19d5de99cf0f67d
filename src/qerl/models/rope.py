"""Rotary position embedding: each pair (j, j + H/2) of a head is rotated by an angle.

    angle_j = position * f_j        y_j         = m * (x_j cos - x_{j+H/2} sin)
                                    y_{j + H/2} = m * (x_{j+H/2} cos + x_j sin)

    default   f_j = theta ** (-2 j / H), m = 1
    linear    f_j / factor, m = 1
    llama3    f_j / factor for long wavelengths, f_j for short ones, a weighted mean between; m = 1
    yarn      as llama3, with limits in turns within the original length; m = 0.1 ln(factor) + 1
    proportional   f_j / factor for the first pairs, 0 for the others, m = 1
    dynamic   the default up to max_position_embeddings, which is the longest sequence here
    longrope  f_j / divisor_j, m = sqrt(1 + ln(factor) / ln(original length))

`rotate_heads` also rotates the first elements of a head only, or neighbors as pairs. Angles and cosines are
fp32; kernels/attention/rotary.py rotates. Sources: Su et al. 2021 (default), Chen et al. 2023 (linear), the
Llama 3.1 release (llama3), Peng et al. 2023 (yarn), Ding et al. 2024 (longrope).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.attention.rotary import rotate
from qerl.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Return f_j, fp32 [H / 2]."""
    f = 1.0 / rope.theta ** (torch.arange(0, head_size, 2).float() / head_size)
    if rope.kind == "proportional":
        return f / rope.factor * (torch.arange(len(f)) < (rope.num_turned or 0))
    if rope.kind == "linear":
        return f / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions * f / (2 * math.pi)  # within the original sequence
        share = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
        return _interpolate(f, rope.factor, share.clamp(0, 1))
    if rope.kind == "yarn":
        first, last = (_dimension(rope, head_size, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.is_truncated:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_size - 1)
        ramp = (torch.arange(head_size // 2) - first) / max(last - first, 0.001)
        return _interpolate(f, rope.factor, 1 - ramp.clamp(0, 1))
    if rope.kind == "longrope":
        return f / torch.tensor(rope.divisors)
    assert rope.kind == "default"
    return f


def _interpolate(f: Tensor, factor: float, share: Tensor) -> Tensor:
    """Return f where the share of it is 1, f / factor where it is 0, a weighted mean between."""
    return f * share + f / factor * (1 - share)


def _dimension(rope: Rope, head_size: int, turns: float) -> float:
    """Return the j whose pair makes this many turns within the original length."""
    return head_size * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def magnitude(rope: Rope) -> float:
    """Return m, the factor of cosine and sine."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.magnitude is not None:
        return rope.magnitude
    if rope.kind == "longrope":
        return math.sqrt(1 + max(math.log(rope.factor), 0) / math.log(rope.original_positions))

    def yarn_magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope.mscale) / yarn_magnitude(rope.mscale_all_dim)
    return yarn_magnitude(1.0)


def cosine_sine(positions_T: Tensor, frequencies: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Return (cosine, sine) for kernels/attention/rotary.py, fp32 [T, 1, H]; the sine is negative in the
    first half."""
    angle = positions_T[:, None].float() * frequencies
    cosine, sine = angle.cos() * size, angle.sin() * size
    return torch.cat((cosine, cosine), -1)[:, None], torch.cat((-sine, sine), -1)[:, None]


class Angles(NamedTuple):
    """Angles by which `rotate_heads` rotates the rows of queries and keys."""

    cosine_T1H: Tensor
    sine_T1H: Tensor
    query_scale_T11: Tensor | None
    """Factor of queries that grow with the position."""


def angles_of(rope: Rope, positions_T: Tensor, frequencies: Tensor) -> Angles:
    cosine, sine = cosine_sine(positions_T, frequencies, magnitude(rope))
    if rope.query_growth == 0:
        return Angles(cosine, sine, None)
    num_turns_T = (positions_T // rope.original_positions).float()
    return Angles(cosine, sine, (1 + rope.query_growth * num_turns_T.log1p())[:, None, None])


def rotate_heads(x_TNH: Tensor, angles: Angles, *, is_interleaved: bool) -> Tensor:
    """Return x with its first elements rotated, as many as there are angles; differentiable in x."""
    cosine, sine = angles.cosine_T1H, angles.sine_T1H
    size = cosine.shape[-1]
    if size == x_TNH.shape[-1] and not is_interleaved:
        return rotate(x_TNH, cosine, sine)
    turned, rest = x_TNH[..., :size], x_TNH[..., size:]
    if is_interleaved:
        halves = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = rotate(halves, cosine, sine).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    else:
        turned = rotate(turned, cosine, sine)
    return torch.cat((turned, rest), -1)


def rotate_both(
    q_TNH: Tensor, k_TKH: Tensor, angles: Angles, *, is_interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return queries and keys rotated, queries times their factor."""
    q_TNH, k_TKH = (rotate_heads(x, angles, is_interleaved=is_interleaved) for x in (q_TNH, k_TKH))
    scale_T11 = angles.query_scale_T11
    return q_TNH if scale_T11 is None else q_TNH * scale_T11.to(q_TNH.dtype), k_TKH
