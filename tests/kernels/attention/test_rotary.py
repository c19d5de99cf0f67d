import pytest
import torch

from conftest import rms_error
from qerl.kernels.attention import rotary as op
from qerl.models.rope import cosine_sine


def _case(T, N, H, dtype, device, rng):
    x, dy = (torch.randn(T, N, H, generator=rng).to(device, dtype) for _ in range(2))
    frequencies = 100.0 ** (-torch.arange(H // 2) / H)
    return x, dy, *(t.to(device) for t in cosine_sine(torch.arange(T) * 7, frequencies, 0.8))


def _with_gradient(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    return y, *torch.autograd.grad(y, x, dy.to(y.dtype))


@pytest.mark.parametrize(("T", "N", "H"), op.CASES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_value_and_gradient_are_the_definitions_rounded_once(T, N, H, dtype, device, rng):
    x, dy, *angles = _case(T, N, H, dtype, device, rng)
    got = _with_gradient(lambda x: op.rotate(x, *angles), x, dy)
    truth = _with_gradient(lambda x: op.reference(x, *angles), x.double(), dy)
    for g, t in zip(got, truth, strict=True):
        rounding = rms_error(t.to(dtype), t) if dtype == torch.bfloat16 else 1e-6
        assert g.dtype == dtype
        assert rms_error(g, t) <= 1.1 * rounding


def test_heads_within_wider_rows_turn_the_same(device, rng):
    x, _, *angles = _case(9, 3, 64, torch.bfloat16, device, rng)
    wide = torch.cat((x.flatten(1), torch.full((9, 40), float("nan"), device=device).bfloat16()), 1)
    assert torch.equal(op.rotate(wide[:, :192].unflatten(1, (3, 64)), *angles), op.rotate(x, *angles))
