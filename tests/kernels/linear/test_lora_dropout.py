import pytest
import torch

from conftest import rms_error
from qerl.kernels.linear import lora_dropout as op


def case(T, K, N, R, device, dtype, rng):
    def random(*shape):
        return torch.randn(shape, generator=rng).to(device)

    return random(T, K).to(dtype), random(R, K) / K**0.5, random(N, R) / R**0.5, random(T, N).to(dtype)


@pytest.mark.parametrize(("T", "K", "N", "R"), op.CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_value_and_gradients_are_the_definitions(T, K, N, R, dtype, limit, device, rng):
    x_TK, a_RK, b_NR, dy_TN = case(T, K, N, R, device, dtype, rng)
    ours = [t.clone().requires_grad_() for t in (x_TK, a_RK, b_NR)]
    work = [t.to(dtype) for t in (a_RK, b_NR)]
    y_TN = op.dropped_lora(*ours, *work, 0.7, rate=0.3, seed=11)
    got = [y_TN, *torch.autograd.grad(y_TN, ours, dy_TN)]
    exact = [t.double().requires_grad_() for t in (x_TK, *work)]
    mask_TK = op.keep_mask(x_TK, 0.3, 11)
    truth = op.reference(exact[0], mask_TK, *exact[1:], 0.7)
    want = [truth, *torch.autograd.grad(truth, exact, dy_TN.double())]
    for one, other in zip(got, want, strict=True):
        assert rms_error(one, other) < limit


def test_the_mask_keeps_its_share_and_the_mean(device):
    x_TK = torch.ones(400, 500, device=device)
    mask_TK = op.keep_mask(x_TK, 0.3, 5)
    assert mask_TK.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert (mask_TK == 0).float().mean().item() == pytest.approx(0.3, abs=0.005)
    assert torch.equal(mask_TK, op.keep_mask(x_TK, 0.3, 5)) and not torch.equal(
        mask_TK, op.keep_mask(x_TK, 0.3, 6)
    )
