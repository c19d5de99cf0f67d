import math

import pytest

from qerl.config import LearnConfig
from qerl.learner.lr_schedule import learning_rate


def rates(num_updates, **settings):
    learn = LearnConfig(learning_rate=2.0, **settings)
    return [learning_rate(u, num_updates=num_updates, learn=learn) for u in range(num_updates)]


def test_the_warm_up_is_linear_and_starts_above_zero():
    got = rates(40, warmup_ratio=0.1, lr_scheduler_type="constant")
    assert got[:6] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert got[4:] == [2.0] * 36


def test_the_cosine_starts_at_the_peak_passes_its_half_midway_and_ends_above_zero():
    got = rates(12, warmup_ratio=1 / 6, lr_scheduler_type="cosine")
    assert got[:3] == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert got[7] == pytest.approx(1.0)
    assert got[11] == pytest.approx(1 + math.cos(math.pi * 0.9))
    assert got[2:] == sorted(got[2:], reverse=True)
    assert 0 < got[-1] < 0.1


def test_without_a_warm_up_the_first_update_has_the_peak_rate():
    assert rates(5, warmup_ratio=0.0, lr_scheduler_type="cosine")[0] == 2.0


def test_the_linear_decay_falls_by_the_same_amount_from_the_peak_and_ends_above_zero():
    got = rates(12, warmup_ratio=1 / 6, lr_scheduler_type="linear")
    assert got == pytest.approx([2 / 3, 4 / 3, *(2.0 * left / 10 for left in range(10, 0, -1))])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_decay_ends_at_the_minimum(schedule):
    whole, part = (
        rates(8, warmup_ratio=0.25, lr_scheduler_type=schedule, min_lr_ratio=low) for low in (0.0, 0.25)
    )
    assert part == pytest.approx([*whole[:2], *(0.5 + 0.75 * rate for rate in whole[2:])])
    learn = LearnConfig(learning_rate=2.0, lr_scheduler_type=schedule, min_lr_ratio=0.25)
    assert learning_rate(8, num_updates=8, learn=learn) == 0.5


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_run_of_one_update_learns(schedule):
    assert rates(1, warmup_ratio=0.1, lr_scheduler_type=schedule) == [2.0]
    assert rates(1, warmup_ratio=1.0, lr_scheduler_type=schedule) == [1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_past_the_end_a_decay_is_zero(schedule):
    learn = LearnConfig(warmup_ratio=0.0, lr_scheduler_type=schedule)
    assert learning_rate(10, num_updates=10, learn=learn) == 0.0
    assert learning_rate(25, num_updates=10, learn=learn) == 0.0
