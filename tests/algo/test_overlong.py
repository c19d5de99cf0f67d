import pytest

from qerl.algo.overlong import OVERLONG
from qerl.types import Sample

CUT = Sample(tokens_T=[5, 6], logprobs_T=[-0.1, -0.2], text="", finish="length", version=0)
COMPLETE = Sample(tokens_T=[5, 2], logprobs_T=[-0.1, -0.2], text="", finish="stop", version=0)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (18432, -0.5), (20480, -1.0)],
)
def test_shape_is_dapos_soft_punishment(length, penalty):
    assert OVERLONG["shape"].penalty(length, 20480, 4096) == pytest.approx(penalty, rel=1e-12)


def test_beyond_max_tokens_the_penalty_stays_at_minus_one():
    assert OVERLONG["shape"].penalty(30000, 20480, 4096) == -1.0


@pytest.mark.parametrize("name", ["keep", "mask"])
def test_keep_and_mask_change_no_reward(name):
    assert OVERLONG[name].penalty(20480, 20480, 4096) == 0.0


def test_only_mask_leaves_a_cut_sample_out():
    assert {name for name, overlong in OVERLONG.items() if not overlong.is_kept(CUT)} == {"mask"}


def test_a_sample_that_ended_by_itself_is_always_kept():
    assert all(overlong.is_kept(COMPLETE) for overlong in OVERLONG.values())
