"""The largest and smallest numbers that a setting may have.

What is beyond them has no meaning, and would show late: as memory that is never enough, a wait that never
ends, or logits that are not finite.

Zero, and what a section checks itself, is not among them. A limit is that of the field's last name.
"""

import functools

from qerl.errors import UserError

_COUNTS = {
    **dict.fromkeys(("num_steps", "max_steps"), 10**9),
    **dict.fromkeys(("num_prompts", "batch_size", "updates_per_step", "num_iterations"), 10**6),
    **dict.fromkeys(("num_generations", "num_samples", "num_branches", "max_num_seqs", "block_size"), 65_536),
    **dict.fromkeys(("rank", "rank_pattern", "expert_rank", "max_concurrent", "max_calls"), 65_536),
    "decode_steps_per_sync": 65_536,
    **dict.fromkeys(("extra_prompts", "max_samples", "max_waiting", "max_connections"), 65_536),
    **dict.fromkeys(("reward_workers", "num_samplers", "retries", "max_staleness"), 4096),
    **dict.fromkeys(("max_rounds", "max_turns"), 10_000),
    "seed": 2**63 - 1,
}
_RANGES = {"temperature": (1e-4, 1e4), "learning_rate": (1e-30, 100.0)}
_SUFFIXES = {"_s": (1e-6, 1e8), "_gb": (1e-6, 1e5), "_mb": (1e-6, 1e9)}
_INTEGERS, _NUMBERS = 10**12, (1e-30, 1e12)
MAX_SAMPLES = 2**20
"""Largest num_prompts * num_generations, the samples of one step."""
UNBOUNDED = frozenset({"gym_options"})
"""Fields whose numbers are for other code."""


def check_bounds(name: str, value: float) -> None:
    """Raise UserError for a number whose magnitude is out of the field's bounds. name: such as
    learn.learning_rate."""
    low, high = _bounds(name.rpartition(".")[2], type(value) is int)
    if value and not low <= abs(value) <= high:
        limit = f"at least {low:g}" if abs(value) < low else f"at most {high:,g}"
        if type(value) is int:
            limit = f"at most {int(high):,}"
        raise UserError(f"{name} must be {limit}{' in magnitude' * (value < 0)}, got {_shown(value)}")


@functools.cache
def _bounds(name: str, is_integer: bool) -> tuple[float, float]:
    if name in _COUNTS:
        return 0, _COUNTS[name]
    for suffix, bounds in ({name: _RANGES[name]} if name in _RANGES else _SUFFIXES).items():
        if name.endswith(suffix):
            return bounds
    return (0, _INTEGERS) if is_integer else _NUMBERS


def _shown(value: float) -> str:
    text = str(value)
    return text if len(text) <= 30 else f"a number of {len(text):,} characters"
