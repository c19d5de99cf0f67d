"""Metrics as words: which of them are times, and how a finished step reads in numbers.

Keys carry their units. A timing key (`rollout_s`, `tokens_per_s`, `memory_gb`, `wall_time`) differs from one
execution to the next; every other key of a continued run equals an unbroken run's.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

TIMING_KEYS = frozenset({"step_s", "tokens_per_s", "memory_gb", "wall_time"})
_SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.2f}"),
    ("eval_accuracy", "held-out", "{:.2f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("mismatch_kl", "kl", "{:.1e}"),
    ("sigma", "sigma", "{:.2g}"),
    ("tokens_per_s", "tokens/s", "{:.0f}"),
    ("memory_gb", "memory", "{:.1f} GB"),
)
_BARS = "".join(chr(0x2581 + i) for i in range(8))
_ASCII_BARS = "_.-=+*%#"
_RECENT_STEPS = 20


def is_timing(key: str) -> bool:
    """Also any other name that ends in `_s`: a span, or a rate such as `prefill_tokens_per_s`."""
    return key in TIMING_KEYS or key.endswith("_s")


def shown(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The few metrics a person follows, as (label, number), always in the same order."""
    for key, label, template in _SHOWN:
        if key in metrics:
            yield label, template.format(metrics[key])


def seconds_left(step_seconds: Sequence[float], steps_left: int) -> float | None:
    """From the pace of the last 20 steps, for samples get longer as a policy learns."""
    recent = step_seconds[-_RECENT_STEPS:]
    return sum(recent) / len(recent) * steps_left if recent else None


def clock(seconds: float) -> str:
    """4:31, or 2:04:31 from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def plain_line(metrics: Mapping[str, float], *, steps_done: int, num_steps: int, left_s: float | None) -> str:
    """`step 3/30  reward 0.412  accuracy 0.41  ...  left 4:31`; the count is of finished steps."""
    parts = [f"step {steps_done}/{num_steps}", *(f"{label} {number}" for label, number in shown(metrics))]
    return "  ".join(parts if left_s is None else [*parts, f"left {clock(left_s)}"])


def sparkline(values: Sequence[float], *, width: int, is_ascii: bool) -> str:
    """The values' course in at most `width` bars, each the mean of its share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    bars = _ASCII_BARS if is_ascii else _BARS
    return "".join(bars[round((mean - low) / span * (len(bars) - 1)) if span else 0] for mean in means)


def one_line(text: str) -> str:
    """Text of unknown origin, safe for a terminal: white space as one blank, control characters as `?`."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
