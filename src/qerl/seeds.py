"""Turning the coordinates of a draw into a seed: no random number depends on what was drawn before it.

    seed = mix(mix(mix(0, a), b), c) ...    mix = SplitMix64's finaliser over the running state

Two different coordinate tuples give unrelated seeds; the same tuple gives the same one on every machine.
Source of the constants: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
"""

_MASK = (1 << 64) - 1


def mix(*coordinates: int) -> int:
    """A 63-bit seed from integers such as (seed, step), for torch.Generator or random.Random."""
    state = len(coordinates)
    for value in coordinates:
        state = (state * 0x9E3779B97F4A7C15 + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def uniform(*coordinates: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on the coordinates alone."""
    return (mix(*coordinates) >> 10) / float(1 << 53)
