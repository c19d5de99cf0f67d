import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.models.norm import RMSNorm


def _norm(rng, width=96, cls=RMSNorm, compute=torch.float32):
    norm = cls(width, 1e-3, compute=compute, device=torch.device("cpu"))
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


def test_the_value_is_rounded_once_to_the_compute_dtype_and_the_gradient_to_the_inputs(rng):
    norm, dy = _norm(rng, compute=torch.bfloat16), torch.randn(7, 96, generator=rng).bfloat16()
    x = torch.randn(7, 96, generator=rng).bfloat16()
    leaves = [x.clone().requires_grad_(), x.float().requires_grad_()]
    values = [norm(leaf) for leaf in leaves]
    norm.compute = torch.float32
    exact = x.float().requires_grad_()
    value = norm(exact)
    assert all(v.dtype == torch.bfloat16 and torch.equal(v, value.bfloat16()) for v in values)
    for v in values:
        v.backward(dy)
    value.backward(dy.float())
    assert torch.equal(leaves[0].grad, exact.grad.bfloat16()) and torch.equal(leaves[1].grad, exact.grad)


def test_noise_adds_to_the_weight_in_fp32(rng):
    norm, x = _norm(rng, cls=NoisedRMSNorm), torch.randn(7, 96, generator=rng)
    quiet, _ = norm(x)
    assert torch.equal(quiet, RMSNorm.forward(norm, x))
    norm.noise.copy_(torch.randn(96, generator=rng) * 1e-6)  # far below bf16's step at the weights
    noisy, _ = norm(x)
    assert not torch.equal(noisy, quiet)
    assert rms_error(noisy, _double(x, norm.weight.double() + norm.noise.double(), norm.eps)) < 1e-6
    norm.noise.zero_()
    assert torch.equal(norm(x)[0], quiet)
