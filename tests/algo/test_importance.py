import math

import pytest
import torch

from qerl.algo.importance import IMPORTANCE, none, ratio, truncated

LEARNER_T = torch.full((4,), -1.0, dtype=torch.float64)
SAMPLER_T = LEARNER_T - torch.tensor([1.0, 1.5, 3.0, 0.25], dtype=torch.float64).log()


def test_truncated_weighs_by_learner_over_sampler_up_to_the_cap():
    denominator_T, weight_T = truncated(LEARNER_T, SAMPLER_T, 2.0)
    assert torch.equal(denominator_T, LEARNER_T)
    assert weight_T.tolist() == pytest.approx([1.0, 1.5, 2.0, 0.25], rel=1e-12)


def test_ratio_is_taken_against_the_sampler_with_no_weight():
    denominator_T, weight_T = ratio(LEARNER_T, SAMPLER_T, 2.0)
    assert torch.equal(denominator_T, SAMPLER_T)
    assert torch.equal(weight_T, torch.ones(4).double())


def test_none_does_not_look_at_the_sampler():
    denominator_T, weight_T = none(LEARNER_T, torch.full((4,), math.nan), 2.0)
    assert torch.equal(denominator_T, LEARNER_T)
    assert torch.equal(weight_T, torch.ones(4).double())


@pytest.mark.parametrize("name", IMPORTANCE)
def test_no_gradient_flows_through_the_correction(name):
    learner_T, sampler_T = LEARNER_T.clone().requires_grad_(), SAMPLER_T.clone().requires_grad_()
    denominator_T, weight_T = IMPORTANCE[name](learner_T, sampler_T, 2.0)
    assert not denominator_T.requires_grad and not weight_T.requires_grad


def test_a_token_the_sampler_thought_impossible_keeps_a_finite_weight():
    _, weight_T = truncated(torch.zeros(1), torch.full((1,), -1e4), 1e30)
    assert weight_T.item() == pytest.approx(math.exp(20.0))
