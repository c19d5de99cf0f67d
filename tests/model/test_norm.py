import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from qerl.model.norm import NoisedRMSNorm, RMSNorm


def _norm(rng, width=96, cls=RMSNorm):
    norm = cls(width, 1e-3)
    norm.weight.copy_(torch.randn(width, generator=rng))
    return norm


def _double(x, weight, eps):
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps)


@pytest.mark.parametrize("shape", ((7, 96), (5, 3, 96)))
def test_fp32_value_and_gradient_are_the_definitions(shape, rng):
    norm, x, dy = _norm(rng), torch.randn(shape, generator=rng) * 0.1, torch.randn(shape, generator=rng)
    x64 = x.double().requires_grad_()
    truth = _double(x64, norm.weight, norm.eps)
    x.requires_grad_()
    got = norm(x)
    assert rms_error(got, truth) < 1e-6
    got.backward(dy)
    truth.backward(dy.double())
    assert rms_error(x.grad, x64.grad) < 1e-6


def test_bf16_is_rounded_once_in_value_and_gradient(rng):
    norm, x, dy = _norm(rng), *(torch.randn(7, 96, generator=rng).bfloat16() for _ in range(2))
    leaves = [x.clone().requires_grad_(), x.float().requires_grad_()]
    values = [norm(leaf) for leaf in leaves]
    assert torch.equal(values[0], values[1].bfloat16())
    values[0].backward(dy)
    values[1].backward(dy.float())
    assert torch.equal(leaves[0].grad, leaves[1].grad.bfloat16())


def test_noise_adds_to_the_weight_in_fp32(rng):
    norm, x = _norm(rng, cls=NoisedRMSNorm), torch.randn(7, 96, generator=rng)
    quiet = norm(x)
    assert torch.equal(quiet, RMSNorm.forward(norm, x))
    norm.noise.copy_(torch.randn(96, generator=rng) * 1e-6)  # far below bf16's step at the weights
    noisy = norm(x)
    assert not torch.equal(noisy, quiet)
    assert rms_error(noisy, _double(x, norm.weight.double() + norm.noise.double(), norm.eps)) < 1e-6
    norm.noise.zero_()
    assert torch.equal(norm(x), quiet)
