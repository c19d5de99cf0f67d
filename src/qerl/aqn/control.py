"""Sigma of the next step from what the noise did in this one: fixed schedules and steered ones, of one kind.

    x = measure - floor        the KL of sampler to learner, less its mean over the steps without noise;
                               or the sampling policy's entropy, whose floor is 0
    adaptive    log sigma += gain clip(log(target / x), -1, 1)            a proposal of ours
    plappert    sigma *= factor if x < target, else sigma /= factor       Plappert et al., arXiv 1706.01905
    a schedule of noise_schedule.py: sigma depends on the step alone

then sigma is clipped to [sigma_min, sigma_max]. KL grows with the square of sigma, so the error of log sigma
shrinks by 1 - 2 gain in each step; from far off it first moves by a factor of exp(gain) a step. Sigma itself
is all that is remembered of an error, so nothing winds up at a bound; where the measure is missing or no
number, sigma stays. x <= 0 (less than the floor) counts as far below the target, and an
infinite KL as far above.
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
    """NoiseState(sigma=0.012, quiet=(3e-5, 4e-5)): what a steered run must know to go on."""

    sigma: float
    """Of the next step that has noise."""
    quiet: tuple[float, ...] = ()
    """What the measure was in the steps without noise."""

    @property
    def floor(self) -> float:
        return fmean(self.quiet) if self.quiet else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """RULES["adaptive"] is Rule(name="adaptive", sigma=steered, after=adapted(adaptive))."""

    name: str
    sigma: Callable[[NoiseState, int, int, NoiseConfig], float]
    """(state, step, num_steps, noise) -> sigma of this step."""
    after: Callable[[NoiseState, int, Mapping[str, float], NoiseConfig], NoiseState]
    """(state, step, metrics, noise) -> the state once the step's metrics are known."""


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


def steered(state: NoiseState, step: int, num_steps: int, noise: NoiseConfig) -> float:
    return 0.0 if step < noise.control.warmup_steps else state.sigma


def adaptive(sigma: float, x: float, control: ControlConfig) -> float:
    return sigma * math.exp(control.gain * _error(x, control.target))


def _error(x: float, target: float) -> float:
    """log(target / x) within -1 to 1."""
    if x <= 0:
        return 1.0
    return -1.0 if x == math.inf else min(max(math.log(target / x), -1.0), 1.0)


def plappert(sigma: float, x: float, control: ControlConfig) -> float:
    return sigma * control.factor if x < control.target else sigma / control.factor


def adapted(move: Callable[[float, float, ControlConfig], float]) -> Callable[..., NoiseState]:
    """The state after a step of which `move` makes the next sigma."""

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
    **{name: Rule(name=name, sigma=scheduled, after=unchanged) for name in SCHEDULES},
    "adaptive": Rule(name="adaptive", sigma=steered, after=adapted(adaptive)),
    "plappert": Rule(name="plappert", sigma=steered, after=adapted(plappert)),
}


def started(noise: NoiseConfig) -> NoiseState:
    return NoiseState(sigma=noise.sigma_start)


def stored(state: NoiseState) -> dict[str, Any]:
    """As JSON has it, every bit of it."""
    return {"sigma": state.sigma, "quiet": list(state.quiet)}


def restored(data: Mapping[str, Any]) -> NoiseState:
    return NoiseState(sigma=data["sigma"], quiet=tuple(data["quiet"]))
