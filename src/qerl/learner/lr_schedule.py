"""Learning rate by update: linear warm-up, then constant, or linear or cosine decay to a minimum.

    update u of U, W = round(warmup_ratio * U), m = min_lr_ratio

    u < W       peak * (u + 1) / (W + 1)
    constant    peak
    linear      peak * (m + (1 - m) * (U - u) / (U - W))
    cosine      peak * (m + (1 - m) * (1 + cos(pi * (u - W) / (U - W))) / 2)

The rate would be zero one update before the first, and the minimum one after the last: no update has a rate
of zero.
"""

import math

from qerl.config import LearnConfig


def learning_rate(update: int, *, num_updates: int, learn: LearnConfig) -> float:
    """Return the rate of update 0 .. num_updates - 1; beyond the end a decay stays at the minimum."""
    assert update >= 0 and num_updates > 0
    warmup_updates = round(learn.warmup_ratio * num_updates)
    if update < warmup_updates:
        return learn.learning_rate * (update + 1) / (warmup_updates + 1)
    if learn.lr_scheduler_type == "constant":
        return learn.learning_rate
    if update >= num_updates:
        return learn.learning_rate * learn.min_lr_ratio
    progress = (update - warmup_updates) / (num_updates - warmup_updates)
    left = 1 - progress if learn.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return learn.learning_rate * (learn.min_lr_ratio + (1 - learn.min_lr_ratio) * left)
