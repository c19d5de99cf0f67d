import itertools
from typing import get_args, get_type_hints

import pytest

from qerl.aqn.control import RULES
from qerl.aqn.schedule import SCHEDULES, sigma
from qerl.config.noise import NoiseConfig

PAPER = {"num_steps": 600, "sigma_start": 1e-2, "sigma_end": 5e-4, "num_stages": 10}


def stages(schedule: str) -> list[float]:
    """Sigma in the first step of each of the paper's ten stages of 60 steps."""
    return [sigma(step, schedule=schedule, **PAPER) for step in range(0, 600, 60)]


def test_the_papers_exponential_stages():
    # Each is the last divided by the eighth root of 20.
    noisy = [1e-2, 6.87656e-3, 4.72871e-3, 3.25172e-3, 2.23607e-3, 1.53765e-3, 1.05737e-3, 7.27108e-4, 5e-4]
    assert stages("exponential") == pytest.approx([0.0, *noisy], rel=5e-6)


def test_the_linear_stages():
    # 1e-2 - i * 9.5e-3 / 8
    expected = [0, 1e-2, 8.8125e-3, 7.625e-3, 6.4375e-3, 5.25e-3, 4.0625e-3, 2.875e-3, 1.6875e-3, 5e-4]
    assert stages("linear") == pytest.approx(expected, rel=1e-12)


def test_the_cosine_stages():
    # 5e-4 + 9.5e-3 (1 + cos(pi i / 8)) / 2
    expected = [0, 1e-2, 9.63843e-3, 8.60876e-3, 7.06775e-3, 5.25e-3, 3.43225e-3, 1.89124e-3, 8.6157e-4, 5e-4]
    assert stages("cosine") == pytest.approx(expected, rel=1e-5)


def test_the_logarithmic_stages():
    # 1e-2 - 9.5e-3 log2(1 + i / 8)
    noisy = [1e-2, 8.38571e-3, 6.94168e-3, 5.63540e-3, 4.44286e-3, 3.34582e-3, 2.33013e-3, 1.38454e-3, 5e-4]
    assert stages("logarithmic") == pytest.approx([0.0, *noisy], rel=5e-6)


def test_constant_holds_the_first_noisy_stages_sigma():
    assert stages("constant") == [0.0] + [1e-2] * 9


def test_none_is_silent():
    assert stages("none") == [0.0] * 10


@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine", "logarithmic"])
def test_a_decay_starts_and_ends_exactly_where_it_was_told_and_only_falls(schedule):
    by_step = [sigma(step, schedule=schedule, **PAPER) for step in range(600)]
    assert (by_step[59], by_step[60], by_step[599]) == (0.0, 1e-2, 5e-4)
    assert all(before >= after for before, after in itertools.pairwise(by_step[60:]))
    assert len(set(by_step)) == 10


@pytest.mark.parametrize("sigma_start", [0.3, 0.05, 1e-2, 3e-3])
@pytest.mark.parametrize("sigma_end", [0.011, 7e-4, 3e-5])
def test_the_last_exponential_stage_is_sigma_end_to_the_last_bit(sigma_start, sigma_end):
    values = {"num_steps": 5, "num_stages": 5, "sigma_start": sigma_start, "sigma_end": sigma_end}
    assert sigma(1, schedule="exponential", **values) == sigma_start
    assert sigma(4, schedule="exponential", **values) == sigma_end


def test_a_stage_changes_only_at_its_first_step():
    by_step = [sigma(step, schedule="linear", **PAPER) for step in range(600)]
    changes = [step for step in range(1, 600) if by_step[step] != by_step[step - 1]]
    assert changes == list(range(60, 600, 60))


def test_two_stages_are_silence_and_then_sigma_start():
    by_step = [
        sigma(step, num_steps=4, schedule="exponential", sigma_start=0.3, sigma_end=0.1, num_stages=2)
        for step in range(4)
    ]
    assert by_step == [0.0, 0.0, 0.3, 0.3]


@pytest.mark.parametrize("num_steps", [10, 11, 25, 39, 101])
def test_stages_that_do_not_divide_the_steps_differ_by_one_step_at_most(num_steps):
    by_step = [
        sigma(step, num_steps=num_steps, schedule="linear", sigma_start=1.0, sigma_end=0.5, num_stages=10)
        for step in range(num_steps)
    ]
    lengths = [by_step.count(value) for value in set(by_step)]
    assert len(lengths) == 10 and max(lengths) - min(lengths) <= 1


def test_every_schedule_and_rule_is_offered_by_the_config():
    assert set(SCHEDULES) < set(RULES) == set(get_args(get_type_hints(NoiseConfig)["schedule"]))


@pytest.mark.parametrize("step", [-1, 600])
def test_a_step_outside_the_run_is_our_mistake(step):
    with pytest.raises(AssertionError):
        sigma(step, schedule="linear", **PAPER)
