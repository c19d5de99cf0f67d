"""Seeds from coordinates such as (seed, step, prompt): no random number depends on earlier ones.

    seed = mix(mix(mix(0, a), b), c) ...    mix = SplitMix64's finalizer over the running state

Two different coordinate tuples give unrelated seeds; the same tuple gives the same one on every machine.
Source of the constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # takes seconds to import

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*coordinates: int) -> int:
    """Return a 63-bit seed from integers such as (seed, step), for torch.Generator or random.Random."""
    return _mixed(coordinates, len(coordinates)) >> 1


def uniform(*coordinates: int) -> float:
    """Return a number in [0, 1) with 53 random bits that depends on the coordinates only."""
    return (mix(*coordinates) >> 10) / float(1 << 53)


def rounds(*coordinates: int) -> int:
    """Return the int64 state that `last_round` needs: all coordinates of `uniform` but a part of the last."""
    *before, last = coordinates
    state = _mixed(before, len(coordinates)) * _GOLDEN + _GOLDEN + last & _MASK
    return state - (1 << 64) if state >> 63 else state


def last_round(states: "Tensor", last: "Tensor") -> "Tensor":
    """Return float64 numbers: last_round(rounds(a, b, c), d) = uniform(a, b, c + d)."""
    assert states.element_size() == 8 and not states.is_floating_point()
    state = states + last  # int64 wraps as the masked integers do
    state = (state ^ _shifted(state, 30)) * (_FIRST - (1 << 64))
    state = (state ^ _shifted(state, 27)) * (_SECOND - (1 << 64))
    return _shifted(state ^ _shifted(state, 31), 11).double() * 2.0**-53


def _shifted(state: "Tensor", bits: int) -> "Tensor":
    """Shift right, filling with zeros."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(coordinates: tuple[int, ...] | list[int], state: int) -> int:
    for value in coordinates:
        state = (state * _GOLDEN + (value & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state
