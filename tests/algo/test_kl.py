import math

import pytest
import torch

from qerl.algo.kl import KL_RATIOS, k3


def test_by_hand():
    # policy 1/2, reference 1/4: r = 1/2, r - ln r - 1 = ln 2 - 1/2; the other way: r = 2, 1 - ln 2
    logprob_T, reference_T = torch.tensor([[0.5, 0.25, 0.3], [0.25, 0.5, 0.3]]).double().log()
    assert k3(logprob_T, reference_T).tolist() == pytest.approx([math.log(2) - 0.5, 1 - math.log(2), 0.0])


def test_value_and_gradient_are_those_of_the_plain_formula(rng):
    logprob_T, reference_T = -3 * torch.rand(2, 1000, dtype=torch.float64, generator=rng)
    logprob_T = logprob_T.requires_grad_()
    x_T = reference_T - logprob_T
    plain_T = x_T.exp() - x_T - 1
    (expected_T,) = torch.autograd.grad(plain_T.sum(), logprob_T)
    got_T = k3(logprob_T, reference_T)
    (gradient_T,) = torch.autograd.grad(got_T.sum(), logprob_T)
    torch.testing.assert_close(got_T, plain_T, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-9, atol=1e-15)


def test_the_reference_gets_no_gradient():
    logprob_T = torch.zeros(1, requires_grad=True)
    reference_T = torch.ones(1, requires_grad=True)
    k3(logprob_T, reference_T).sum().backward()
    assert reference_T.grad is None and logprob_T.grad is not None


def test_its_mean_over_the_policy_is_the_divergence():
    policy_V, reference_V = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3]]).double().log()
    divergence = (policy_V.exp() * (policy_V - reference_V)).sum()
    assert (policy_V.exp() * k3(policy_V, reference_V)).sum().item() == pytest.approx(divergence.item())


def test_a_small_difference_survives_fp32():
    logprob_T = torch.tensor([-3e-4])
    assert k3(logprob_T, torch.zeros(1)).item() == pytest.approx(4.5e-8, rel=1e-3)


def test_a_wild_difference_stays_finite():
    logprob_T = torch.tensor([-200.0, 200.0], requires_grad=True)
    got_T = k3(logprob_T, torch.zeros(2))
    got_T.sum().backward()
    assert got_T.isfinite().all() and logprob_T.grad.isfinite().all()


def test_the_ratio_makes_the_gradient_that_of_the_divergence():
    logits_V = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference_V = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprob_V = logits_V.log_softmax(0)
    divergence = (logprob_V.exp() * (logprob_V - reference_V)).sum()
    (expected_V,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    old_V = logprob_V.detach()  # the policy that samples: the mean over its tokens is exact
    gradients = {}
    for name, ratio in KL_RATIOS.items():
        mean = (old_V.exp() * ratio(logprob_V, old_V) * k3(logprob_V, reference_V)).sum()
        (gradients[name],) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    torch.testing.assert_close(gradients["k3_unbiased"], expected_V)
    assert (gradients["k3"] - expected_V).abs().max() > 0.01
