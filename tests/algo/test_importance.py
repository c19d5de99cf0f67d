"""Two samples of three and one tokens, rho = 1, 4, 1/4 and 3 between learner and sampler, in float64."""

import dataclasses
import math

import pytest
import torch

from qerl.algo.importance import IMPORTANCE, correct, effective_fraction
from qerl.algo.segment import Segments
from qerl.config import AlgoConfig

RHO = [1.0, 4.0, 0.25, 3.0]
LEARNER_T = torch.full((4,), -1.0, dtype=torch.float64)
SAMPLER_T = LEARNER_T - torch.tensor(RHO, dtype=torch.float64).log()
SPANS = Segments.of([3, 1])
EQUAL = Segments.of([1])


def corrected(importance="none", **algo):
    given = {"importance_cap": 3.5, "importance_floor": 0.5} | algo
    return correct(LEARNER_T, SAMPLER_T, SPANS, AlgoConfig(importance=importance, **given))


@pytest.mark.parametrize(
    ("importance", "weights", "capped", "masked"),
    [
        ("truncated", [1, 3.5, 0.25, 3], [0, 1, 0, 0], [0, 0, 0, 0]),
        ("truncated_sequence", [1, 1, 1, 3], [0, 0, 0, 0], [0, 0, 0, 0]),  # 1 * 4 / 4 and 3
        ("masked", [1, 0, 0.25, 3], [0, 0, 0, 0], [0, 1, 0, 0]),
        ("masked_sequence", [1, 1, 1, 3], [0, 0, 0, 0], [0, 0, 0, 0]),
        ("icepop", [1, 0, 0, 3], [0, 0, 0, 0], [0, 1, 1, 0]),
        ("ratio", [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]),
        ("none", [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_the_weights_by_hand(importance, weights, capped, masked):
    found = corrected(importance)
    assert found.weight_T.tolist() == pytest.approx(weights, rel=1e-12)
    assert (found.was_capped_T.tolist(), found.was_masked_T.tolist()) == (capped, masked)
    assert found.was_rejected_S.tolist() == [False, False]


def test_a_whole_sample_is_capped_or_masked_by_its_product():
    # a cap of 0.9 is under both products, 1 and 3; one of 2 under the second
    assert corrected("truncated_sequence", importance_cap=0.9).weight_T.tolist() == [0.9] * 4
    assert corrected("truncated_sequence", importance_cap=0.9).was_capped_T.all()
    found = corrected("masked_sequence", importance_cap=2.0)
    assert found.weight_T.tolist() == pytest.approx([1, 1, 1, 0], rel=1e-12)
    assert found.was_masked_T.tolist() == [False, False, False, True]


def test_what_lies_on_a_bound_is_kept():
    equal_T = torch.zeros(1, dtype=torch.float64)
    for importance in ("masked", "masked_sequence", "icepop"):
        algo = AlgoConfig(importance=importance, importance_cap=1.0, importance_floor=0.5)
        assert correct(equal_T, equal_T, EQUAL, algo).weight_T.tolist() == [1.0]
    algo = AlgoConfig(
        importance="icepop", importance_cap=2.0, importance_floor=1.0, reject=("geometric", "veto")
    )
    algo = dataclasses.replace(algo, geometric_low=1.0, geometric_high=1.5, veto_ratio=1.0)
    assert correct(equal_T, equal_T, EQUAL, algo).weight_T.tolist() == [1.0]


def test_geometric_rejection_looks_at_the_mean_of_a_sample():
    # geometric means 1 and 3
    found = corrected("truncated", reject=("geometric",), geometric_low=0.9, geometric_high=1.1)
    assert found.weight_T.tolist() == pytest.approx([1, 3.5, 0.25, 0], rel=1e-12)
    assert found.was_rejected_S.tolist() == [False, True]
    assert found.was_masked_T.tolist() == [False] * 4
    found = corrected("truncated", reject=("geometric",), geometric_low=2.0, geometric_high=4.0)
    assert found.was_rejected_S.tolist() == [True, False]


def test_one_token_vetoes_its_sample():
    found = corrected(reject=("veto",), veto_ratio=0.3)
    assert found.weight_T.tolist() == [0, 0, 0, 1]
    assert found.was_rejected_S.tolist() == [True, False]
    assert not corrected(reject=("veto",), veto_ratio=0.2).was_rejected_S.any()


def test_a_sample_stays_only_if_no_rejection_takes_it():
    algo = {"veto_ratio": 0.3, "geometric_low": 0.9, "geometric_high": 1.1}
    assert corrected(reject=("veto", "geometric"), **algo).was_rejected_S.tolist() == [True, True]


def test_ratio_is_taken_against_the_sampler_and_all_others_against_the_learner():
    for name in IMPORTANCE:
        old_T = SAMPLER_T if name == "ratio" else LEARNER_T
        assert torch.equal(corrected(name).old_T, old_T)


def test_none_does_not_look_at_the_sampler():
    found = correct(LEARNER_T, torch.full((4,), math.nan), SPANS, AlgoConfig(importance="none"))
    assert torch.equal(found.weight_T, torch.ones(4).double())


@pytest.mark.parametrize("name", IMPORTANCE)
def test_no_gradient_flows_through_the_correction(name):
    learner_T, sampler_T = LEARNER_T.clone().requires_grad_(), SAMPLER_T.clone().requires_grad_()
    algo = AlgoConfig(importance=name, reject=("geometric", "veto"))
    found = correct(learner_T, sampler_T, SPANS, algo)
    assert not found.old_T.requires_grad and not found.weight_T.requires_grad


@pytest.mark.parametrize("name", ["truncated", "truncated_sequence"])
def test_tokens_the_sampler_thought_impossible_keep_a_finite_weight(name):
    algo = AlgoConfig(importance=name, importance_cap=1e30)
    two = Segments.of([2])
    found = correct(torch.zeros(2), torch.full((2,), -1e4), two, algo)
    assert found.weight_T.tolist() == pytest.approx([math.exp(20.0)] * 2)


def test_the_effective_fraction_by_hand():
    # (1 + 3 + 0 + 0)^2 / (4 * (1 + 9)) = 16 / 40
    assert effective_fraction(1.0 + 3.0, 1.0 + 9.0, 4) == pytest.approx(0.4, rel=1e-12)
    assert effective_fraction(7 * 0.3, 7 * 0.09, 7) == pytest.approx(1.0, rel=1e-12)
