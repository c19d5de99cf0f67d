"""Schedules of AQN's sigma by step.

    stage = floor(step K / num_steps)           K stages, as equal as whole steps allow
    sigma = 0                                   in stage 0: only the quantization's own noise
    sigma = between(start, end, i / (K - 2))    in stage i + 1, i = 0 .. K - 2

    exponential   start^(1 - f) end^f                                   QeRL, arXiv 2510.11696, equation 8
    linear        start (1 - g) + end g      g = f
    cosine                                   g = (1 - cos(pi f)) / 2
    logarithmic                              g = log2(1 + f)
    constant      start
    none          0

Equation 8 as printed never reaches sigma_end; dividing by K - 2 makes the first noisy stage exactly
sigma_start and the last exactly sigma_end. The paper compares a linear, a cosine and a logarithmic decay
without giving formulas: these are ours.
"""

import math
from collections.abc import Callable


def sigma(
    step: int, *, num_steps: int, schedule: str, sigma_start: float, sigma_end: float, num_stages: int
) -> float:
    """Return the standard deviation of the noise while this step samples; steps count from 0."""
    assert 0 <= step < num_steps and num_stages >= 2, (step, num_steps, num_stages)
    stage = step * num_stages // num_steps
    if stage == 0:
        return 0.0
    fraction = (stage - 1) / max(1, num_stages - 2)
    return SCHEDULES[schedule](sigma_start, sigma_end, fraction)


def _linear(start: float, end: float, fraction: float) -> float:
    return start * (1.0 - fraction) + end * fraction


SCHEDULES: dict[str, Callable[[float, float, float], float]] = {
    "exponential": lambda start, end, f: start ** (1.0 - f) * end**f,
    "linear": _linear,
    "cosine": lambda start, end, f: _linear(start, end, (1.0 - math.cos(math.pi * f)) / 2.0),
    "logarithmic": lambda start, end, f: _linear(start, end, math.log2(1.0 + f)),
    "constant": lambda start, end, f: start,
    "none": lambda start, end, f: 0.0,
}
