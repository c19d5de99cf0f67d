"""A simulated policy: KL = c sigma^2 + floor, times a factor that is never far from 1."""

import dataclasses
import json
import math
import random
from statistics import fmean

import pytest

from qerl.aqn.control import RULES, NoiseState, restored
from qerl.aqn.schedule import SCHEDULES, sigma
from qerl.config import ControlConfig, NoiseConfig

FLOOR, SLOPE = 4e-4, 40.0
CONTROL = ControlConfig(target=1e-2, gain=0.2, factor=1.1, warmup_steps=4, sigma_min=1e-4, sigma_max=0.2)
AT_TARGET = math.sqrt(1e-2 / SLOPE)  # 0.0158


def noise(schedule="adaptive", sigma_start=AT_TARGET, **control):
    return NoiseConfig(
        schedule=schedule, sigma_start=sigma_start, control=dataclasses.replace(CONTROL, **control)
    )


def simulated(config, num_steps, *, slope=SLOPE, jitter=0.1, missing=lambda step: False, state=None, start=0):
    """Sigma of each step, and the state after the last."""
    rule, state, sigmas = RULES[config.schedule], state or NoiseState(sigma=config.sigma_start), []
    for step in range(start, start + num_steps):
        now = rule.sigma(state, step, 1000, config)
        sigmas.append(now)
        kl = (slope * now**2 + FLOOR) * math.exp(jitter * random.Random(step).gauss(0, 1))
        metrics = {"mismatch_abs": 0.1} if missing(step) else {"mismatch_kl": kl}
        state = rule.after(state, step, metrics, config)
    return sigmas, state


@pytest.mark.parametrize("sigma_start", [AT_TARGET / 10, AT_TARGET * 10])
@pytest.mark.parametrize(("schedule", "num_steps"), [("adaptive", 16), ("plappert", 30)])
def test_from_ten_times_too_little_or_too_much_sigma_comes_to_the_target_and_stays(
    schedule, num_steps, sigma_start
):
    """adaptive: 10 steps of exp(0.2) at most bring it within exp(1), each further one shrinks what is left by
    0.6. plappert: 24.2 steps of 1.1."""
    sigmas, _ = simulated(noise(schedule, sigma_start), 4 + num_steps + 200)
    settled = sigmas[4 + num_steps :]
    assert sigmas[:4] == [0.0] * 4 and sigmas[4] == sigma_start
    assert all(abs(math.log(s / AT_TARGET)) < 0.25 for s in settled)
    assert abs(math.log(fmean(settled) / AT_TARGET)) < 0.05
    assert abs(math.log(sigmas[4 + num_steps // 3] / AT_TARGET)) > 0.25


def test_a_step_in_the_policy_is_answered_within_ten_steps():
    """At twice the slope sigma is sqrt(2) too large."""
    config = noise()
    _, state = simulated(config, 40)
    sigmas, _ = simulated(config, 60, slope=2 * SLOPE, state=state, start=40)
    assert abs(math.log(sigmas[0] / AT_TARGET)) < 0.25
    assert all(abs(math.log(s * math.sqrt(2) / AT_TARGET)) < 0.25 for s in sigmas[10:])


def test_one_step_by_hand():
    state = NoiseState(sigma=0.01, quiet=(1e-4, 3e-4))
    # x = 0.0052 - 0.0002 = 0.005, target twice that: sigma * 2^0.2; at a tenth of the target the clip holds
    after = RULES["adaptive"].after
    assert after(state, 9, {"mismatch_kl": 0.0052}, noise()).sigma == pytest.approx(0.01 * 2**0.2, rel=1e-9)
    assert after(state, 9, {"mismatch_kl": 0.0012}, noise()).sigma == pytest.approx(0.01 * math.exp(0.2))
    assert after(state, 9, {"mismatch_kl": 0.1002}, noise()).sigma == pytest.approx(0.01 * math.exp(-0.2))
    after, config = RULES["plappert"].after, noise("plappert")
    assert after(state, 9, {"mismatch_kl": 0.0101}, config).sigma == pytest.approx(0.011)
    assert after(state, 9, {"mismatch_kl": 0.0103}, config).sigma == pytest.approx(0.01 / 1.1)


def test_the_floor_is_what_the_quiet_steps_showed_and_is_taken_off():
    """Without it the noise would vanish where the target is no larger than the floor."""
    _, state = simulated(noise(), 4, jitter=0.0)
    assert state.quiet == pytest.approx([FLOOR] * 4, rel=1e-12) and state.floor == pytest.approx(FLOOR)
    sigmas, _ = simulated(noise(target=FLOOR), 100, jitter=0.0)
    assert sigmas[-1] == pytest.approx(math.sqrt(FLOOR / SLOPE), rel=1e-6)
    sigmas, _ = simulated(noise(target=FLOOR, warmup_steps=0, sigma_min=1e-6), 200, jitter=0.0)
    assert sigmas[-1] < 0.2 * math.sqrt(FLOOR / SLOPE)


@pytest.mark.parametrize("schedule", ["adaptive", "plappert"])
@pytest.mark.parametrize(("slope", "bound"), [(1e-3, 0.02), (1e6, 0.01)])
def test_at_a_bound_nothing_winds_up(schedule, slope, bound):
    """However long sigma stood at the bound, the first step that wants it back brings it back."""
    config = noise(schedule, sigma_min=0.01, sigma_max=0.02)
    for num_steps in (50, 500):
        sigmas, state = simulated(config, num_steps, slope=slope)
        assert all(0.01 <= s <= 0.02 for s in sigmas[4:]) and state.sigma == bound
        kl = 0.0 if bound == 0.01 else 1.0
        moved = RULES[schedule].after(state, num_steps, {"mismatch_kl": kl}, config)
        assert abs(math.log(moved.sigma / bound)) == pytest.approx(
            0.2 if schedule == "adaptive" else math.log(1.1)
        )


@pytest.mark.parametrize("schedule", ["adaptive", "plappert"])
@pytest.mark.parametrize("metrics", [{}, {"mismatch_kl": math.nan}])
@pytest.mark.parametrize("step", [0, 50])
def test_without_a_measure_nothing_moves(schedule, metrics, step):
    state = NoiseState(sigma=0.01, quiet=(1e-4,))
    assert RULES[schedule].after(state, step, metrics, noise(schedule)) == state


def test_a_policy_without_a_measure_half_of_the_time_settles_too():
    sigmas, _ = simulated(noise(sigma_start=AT_TARGET / 10), 60, missing=lambda step: step % 2 == 0)
    assert all(abs(math.log(s / AT_TARGET)) < 0.25 for s in sigmas[40:])


def test_a_measure_beyond_all_bounds_moves_sigma_the_right_way():
    state = NoiseState(sigma=0.01, quiet=(1e-3,))
    for schedule, factor in (("adaptive", math.exp(0.2)), ("plappert", 1.1)):
        after, config = RULES[schedule].after, noise(schedule)
        for kl in (0.0, 5e-4, 1e-3, 1e-3 + 1e-18):
            assert after(state, 9, {"mismatch_kl": kl}, config).sigma == pytest.approx(0.01 * factor)
        assert after(state, 9, {"mismatch_kl": math.inf}, config).sigma == pytest.approx(0.01 / factor)
    assert RULES["adaptive"].after(state, 0, {"mismatch_kl": math.inf}, noise()) == state


def test_entropy_is_steered_without_a_floor():
    config = noise(measure="entropy", target=1.0)
    state, after = NoiseState(sigma=0.01), RULES["adaptive"].after
    assert after(state, 0, {"sampler_entropy": 0.5}, config) == state  # a quiet step
    assert after(state, 9, {"sampler_entropy": 0.5}, config).sigma == pytest.approx(0.01 * 2**0.2)
    assert after(state, 9, {"sampler_entropy": 2.0}, config).sigma == pytest.approx(0.01 / 2**0.2)
    assert after(state, 9, {"mismatch_kl": 0.5}, config) == state


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_a_rule_that_nothing_moves(schedule):
    config = NoiseConfig(schedule=schedule)
    state, rule = NoiseState(sigma=config.sigma_start), RULES[schedule]
    assert rule.after(state, 3, {"mismatch_kl": 1.0}, config) == state
    for step in (0, 10, 99):
        assert rule.sigma(state, step, 100, config) == sigma(
            step, num_steps=100, schedule=schedule, sigma_start=1e-2, sigma_end=5e-4, num_stages=10
        )


def test_a_run_of_few_steps_has_a_stage_a_step():
    config = NoiseConfig(sigma_start=0.04, sigma_end=0.01)
    state, rule = NoiseState(sigma=config.sigma_start), RULES["exponential"]
    assert [rule.sigma(state, step, 4, config) for step in range(4)] == pytest.approx([0, 0.04, 0.02, 0.01])
    assert rule.sigma(state, 0, 1, config) == 0.0


def test_a_state_comes_back_from_json_bit_for_bit():
    config = noise(sigma_start=AT_TARGET / 3)
    unbroken, last = simulated(config, 30)
    first, state = simulated(config, 11)
    state = restored(json.loads(json.dumps(dataclasses.asdict(state))))
    second, end = simulated(config, 19, state=state, start=11)
    assert first + second == unbroken and end == last
