"""Rules for sigma: fixed schedules, and controllers that react to the noise's measured effect.

    x = measure - floor        KL(sampler || learner) minus its mean over the steps without noise;
                               or the sampling policy's entropy, with floor 0
    adaptive    log sigma += gain clip(log(target / x), -1, 1)            proposed here
    plappert    sigma *= factor if x < target, else sigma /= factor       Plappert et al., arXiv 1706.01905
    a schedule of schedule.py: sigma depends on the step alone

Then sigma is clipped to [sigma_min, sigma_max]. KL grows with the square of sigma, so the error of log sigma
shrinks by 1 - 2 gain per step; far from the target sigma moves by a factor of exp(gain) per step. Sigma is
the only state, so there is no integral wind-up at a bound. If the measure is missing or NaN, sigma stays.
x <= 0 (below the floor) counts as far below the target, an infinite KL as far above.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from qerl.aqn.schedule import SCHEDULES, sigma
from qerl.config import ControlConfig, NoiseConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoiseState:
    """NoiseState(sigma=0.012, quiet=(3e-5, 4e-5)): the state of a controlled run."""

    sigma: float
    """Sigma of the next noisy step."""
    quiet: tuple[float, ...] = ()
    """Values of the measure in the steps without noise."""

    @property
    def floor(self) -> float:
        return fmean(self.quiet) if self.quiet else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """RULES["adaptive"] is Rule(sigma=controlled, after=adapted(adaptive))."""

    sigma: Callable[[NoiseState, int, int, NoiseConfig], float]
    """(state, step, num_steps, noise) -> sigma of this step."""
    after: Callable[[NoiseState, int, Mapping[str, float], NoiseConfig], NoiseState]
    """(state, step, metrics, noise) -> state after the step's metrics are known."""


MEASURES = {"kl": "mismatch_kl", "entropy": "sampler_entropy"}


def scheduled(state: NoiseState, step: int, num_steps: int, noise: NoiseConfig) -> float:
    return sigma(
        step,
        num_steps=num_steps,
        schedule=noise.schedule,
        sigma_start=noise.sigma_start,
        sigma_end=noise.sigma_end,
        num_stages=max(2, min(noise.num_stages, num_steps)),
    )


def unchanged(state: NoiseState, step: int, metrics: Mapping[str, float], noise: NoiseConfig) -> NoiseState:
    return state


def controlled(state: NoiseState, step: int, num_steps: int, noise: NoiseConfig) -> float:
    return 0.0 if step < noise.control.warmup_steps else state.sigma


def adaptive(sigma: float, x: float, control: ControlConfig) -> float:
    return sigma * math.exp(control.gain * _error(x, control.target))


def _error(x: float, target: float) -> float:
    """Return log(target / x), clipped to [-1, 1]."""
    if x <= 0:
        return 1.0
    return -1.0 if x == math.inf else min(max(math.log(target / x), -1.0), 1.0)


def plappert(sigma: float, x: float, control: ControlConfig) -> float:
    return sigma * control.factor if x < control.target else sigma / control.factor


def adapted(move: Callable[[float, float, ControlConfig], float]) -> Callable[..., NoiseState]:
    """Return the state after a step, with the next sigma from `move`."""

    def after(state: NoiseState, step: int, metrics: Mapping[str, float], noise: NoiseConfig) -> NoiseState:
        control = noise.control
        value = metrics.get(MEASURES[control.measure], math.nan)
        if math.isnan(value):
            return state
        if step < control.warmup_steps:
            has_floor = control.measure == "kl" and value < math.inf
            return dataclasses.replace(state, quiet=(*state.quiet, value)) if has_floor else state
        moved = move(state.sigma, value - state.floor, control)
        return dataclasses.replace(state, sigma=min(max(moved, control.sigma_min), control.sigma_max))

    return after


RULES: dict[str, Rule] = {
    **{name: Rule(sigma=scheduled, after=unchanged) for name in SCHEDULES},
    "adaptive": Rule(sigma=controlled, after=adapted(adaptive)),
    "plappert": Rule(sigma=controlled, after=adapted(plappert)),
}


def restored(data: Mapping[str, Any]) -> NoiseState:
    """Return the state from JSON values, of which `quiet` is a list."""
    return NoiseState(sigma=data["sigma"], quiet=tuple(data["quiet"]))
