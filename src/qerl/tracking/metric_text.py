"""Format metrics as text, and tell timing metrics from the others.

Keys end in their unit. A timing key (`rollout_s`, `tokens_per_s`, `memory_gb`, `wall_time`) differs from one
execution to the next, as does what depends on when requests meet (`kept_tokens`, `prefill_tokens`); every
other metric of a resumed run equals that of an uninterrupted run.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

TIMING_KEYS = frozenset(
    {"step_s", "tokens_per_s", "memory_gb", "wall_time", "waiting_share", "kept_tokens", "prefill_tokens"}
)
_HEADLINES = (
    ("nll", "loss", "{:.4f}"),
    ("eval_nll", "held-out loss", "{:.4f}"),
    ("loss", "loss", "{:.4f}"),
    ("eval_loss", "held-out loss", "{:.4f}"),
    ("rewards/accuracies", "accuracy", "{:.2f}"),
    ("eval_rewards/accuracies", "held-out", "{:.2f}"),
    ("rewards/margins", "margin", "{:.3f}"),
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.2f}"),
    ("eval_accuracy", "held-out", "{:.2f}"),
    ("eval_reward", "held-out reward", "{:.3f}"),
    ("mean_tokens", "length", "{:.0f}"),
    ("cut_fraction", "cut", "{:.0%}"),
    ("teacher_kl", "teacher kl", "{:.3f}"),
    ("entropy", "entropy", "{:.2f}"),
    ("mismatch_kl", "mismatch", "{:.1e}"),
    ("sigma", "sigma", "{:.2g}"),
    ("tokens_per_s", "tokens/s", "{:.0f}"),
    ("memory_gb", "memory", "{:.1f} GB"),
)
_REPEATS = {"accuracy": "reward", "eval_reward": "eval_accuracy"}  # not shown where both are equal
_BARS = "".join(chr(0x2581 + i) for i in range(8))
_ASCII_BARS = "_.-=+*%#"
_RECENT_STEPS = 20


def is_timing(key: str) -> bool:
    """True for TIMING_KEYS and any key that ends in `_s`: a duration, or a rate per second."""
    return key in TIMING_KEYS or key.endswith("_s")


def headline_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of the main metrics that are there, in a fixed order."""
    for key, label, template in _HEADLINES:
        is_repeated = key in _REPEATS and metrics.get(key) == metrics.get(_REPEATS[key])
        is_off = key == "sigma" and not metrics.get(key)
        is_off |= key == "loss" and "logps/chosen" not in metrics and "logps/rejected" not in metrics
        if key in metrics and not is_repeated and not is_off:
            yield label, template.format(metrics[key])


def seconds_left(step_seconds: Sequence[float], steps_left: int, end_s: float = 0.0) -> float | None:
    """Estimate from the mean of the last 20 steps, as samples get longer during training. end_s: what follows
    the last step."""
    recent = step_seconds[-_RECENT_STEPS:]
    return sum(recent) / len(recent) * steps_left + end_s if recent else None


def clock(seconds: float) -> str:
    """Format as 4:31, or 2:04:31 from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def plain_line(metrics: Mapping[str, float], *, steps_done: int, num_steps: int, left_s: float | None) -> str:
    """Return `step 3/30  reward 0.412  accuracy 0.41  ...  left 4:31`."""
    numbers = [f"{label} {number}" for label, number in headline_metrics(metrics)]
    parts = [f"step {steps_done}/{num_steps}", *numbers]
    return "  ".join(parts if left_s is None else [*parts, f"left {clock(left_s)}"])


def sparkline(values: Sequence[float], *, width: int, is_ascii: bool) -> str:
    """Return at most `width` bars, each the mean of an equal share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    bars = _ASCII_BARS if is_ascii else _BARS
    return "".join(bars[round((mean - low) / span * (len(bars) - 1)) if span else 0] for mean in means)


def one_line(text: str) -> str:
    """Make text safe to print: each run of white space becomes one space, control characters become `?`."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
