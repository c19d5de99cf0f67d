import pytest
import torch

from conftest import rms_error
from qerl.kernels.linear import full_linear as op


def _case(T, K, N, has_bias, device, dtype, rng):
    def random(*shape):
        return torch.randn(shape, generator=rng).to(device)

    master_NK = random(N, K)
    bias_N = random(N).to(dtype) if has_bias else None
    return random(T, K).to(dtype), master_NK, bias_N, random(T, N).to(dtype)


def _ours(x_TK, master_NK, bias_N, dy_TN):
    x_TK, master_NK = x_TK.clone().requires_grad_(), master_NK.clone().requires_grad_()
    y_TN = op.full_linear(x_TK, master_NK.detach().to(x_TK.dtype), master_NK, bias_N)
    return [y_TN, *torch.autograd.grad(y_TN, (x_TK, master_NK), dy_TN)]


def _truth(x_TK, master_NK, bias_N, dy_TN):
    x_TK = x_TK.double().requires_grad_()
    work_NK = master_NK.to(dy_TN.dtype).double().requires_grad_()
    y_TN = op.reference(x_TK, work_NK, bias_N)
    return [y_TN, *torch.autograd.grad(y_TN, (x_TK, work_NK), dy_TN.double())]


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize(("T", "K", "N"), op.CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_value_and_gradients_are_the_definitions(T, K, N, has_bias, dtype, limit, device, rng):
    case = _case(T, K, N, has_bias, device, dtype, rng)
    for got, want in zip(_ours(*case), _truth(*case), strict=True):
        assert rms_error(got, want) < limit


@pytest.mark.parametrize(("T", "K", "N"), op.CASES)
def test_the_masters_gradient_is_not_rounded_to_16_bits(T, K, N, device, rng):
    case = _case(T, K, N, False, device, torch.bfloat16, rng)
    got, want = _ours(*case)[2], _truth(*case)[2]
    assert got.dtype == torch.float32 and rms_error(got, want) < 2e-5


def test_an_input_without_a_gradient_costs_none(device, rng):
    x_TK, master_NK, _, dy_TN = _case(5, 8, 6, False, device, torch.float32, rng)
    master_NK.requires_grad_()
    op.full_linear(x_TK, master_NK.detach().clone(), master_NK, None).backward(dy_TN)
    assert x_TK.grad is None and master_NK.grad is not None
