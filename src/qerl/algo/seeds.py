"""Turning the coordinates of a draw into a seed: no random number depends on what was drawn before it.

    seed = mix(mix(mix(0, a), b), c) ...    mix = SplitMix64's finaliser over the running state

Two different coordinate tuples give unrelated seeds; the same tuple gives the same one on every machine.
Source of the constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*coordinates: int) -> int:
    """A 63-bit seed from integers such as (seed, step), for torch.Generator or random.Random."""
    return _mixed(coordinates, len(coordinates)) >> 1


def uniform(*coordinates: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on the coordinates alone."""
    return (mix(*coordinates) >> 10) / float(1 << 53)


def rounds(*coordinates: int) -> int:
    """What `last_round` needs of all coordinates of `uniform` but a part of the last: int64."""
    *before, last = coordinates
    state = _mixed(before, len(coordinates)) * _GOLDEN + _GOLDEN + last & _MASK
    return state - (1 << 64) if state >> 63 else state


def last_round(states: Tensor, last: Tensor) -> Tensor:
    """float64, where `states` are of `rounds`: last_round(rounds(a, b, c), d) = uniform(a, b, c + d)."""
    assert states.dtype == torch.int64
    state = states + last  # int64 wraps as the masked integers do
    state = (state ^ _shifted(state, 30)) * (_FIRST - (1 << 64))
    state = (state ^ _shifted(state, 27)) * (_SECOND - (1 << 64))
    return _shifted(state ^ _shifted(state, 31), 11).double() * 2.0**-53


def _shifted(state: Tensor, bits: int) -> Tensor:
    """To the right, zeros moving in."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(coordinates: tuple[int, ...] | list[int], state: int) -> int:
    for value in coordinates:
        state = (state * _GOLDEN + (value & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state
