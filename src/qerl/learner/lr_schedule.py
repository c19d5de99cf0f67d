"""Learning rate by update: linear warm-up, then constant, or linear or cosine decay to zero.

    update u of U, W = round(warmup_ratio * U)

    u < W       peak * (u + 1) / (W + 1)
    constant    peak
    linear      peak * (U - u) / (U - W)
    cosine      peak * (1 + cos(pi * (u - W) / (U - W))) / 2

The rate would be zero one update before the first and one after the last: no update has a rate of zero.
"""

import math

from qerl.config import LearnConfig


def learning_rate(update: int, *, num_updates: int, learn: LearnConfig) -> float:
    """Return the rate of update 0 .. num_updates - 1; beyond the end a decay stays at zero."""
    assert update >= 0 and num_updates > 0
    warmup_updates = round(learn.warmup_ratio * num_updates)
    if update < warmup_updates:
        return learn.learning_rate * (update + 1) / (warmup_updates + 1)
    if learn.lr_scheduler_type == "constant":
        return learn.learning_rate
    if update >= num_updates:
        return 0.0
    progress = (update - warmup_updates) / (num_updates - warmup_updates)
    left = 1 - progress if learn.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return learn.learning_rate * left
