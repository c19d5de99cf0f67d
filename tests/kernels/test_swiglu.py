import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from qerl.kernels import swiglu as op


def _case(T, F, dtype, device, rng):
    gate_up, dy = torch.randn(T, 2 * F, generator=rng) * 2, torch.randn(T, F, generator=rng)
    return *gate_up.to(device, dtype).chunk(2, 1), dy.to(device, dtype)


def _with_gradients(function, gate, up, dy):
    gate, up = (x.detach().requires_grad_() for x in (gate, up))
    y = function(gate, up)
    return y, *torch.autograd.grad(y, (gate, up), dy.to(y.dtype))


def _truth(gate, up, dy):
    return _with_gradients(op.reference, gate.double(), up.double(), dy)


@pytest.mark.parametrize(("T", "F"), op.CASES)
def test_fp32_value_and_gradients_are_the_definitions(T, F, device, rng):
    case = _case(T, F, torch.float32, device, rng)
    for got, truth in zip(_with_gradients(op.swiglu, *case), _truth(*case), strict=True):
        assert rms_error(got, truth) < 1e-6


@pytest.mark.parametrize("room", (0, 24))
@pytest.mark.parametrize(("T", "width"), op.CASES)
def test_bf16_loses_no_more_than_torchs_operations(T, width, room, device, rng):
    case = _case(T, width, torch.bfloat16, device, rng)
    plain = _with_gradients(lambda gate, up: F.silu(gate) * up, *case)
    ours = _with_gradients(lambda gate, up: op.swiglu(gate, up, room=room), *case)
    for got, theirs, truth in zip(ours, plain, _truth(*case), strict=True):
        assert got.dtype == torch.bfloat16
        assert rms_error(got, truth) <= 1.1 * rms_error(theirs, truth)


@pytest.mark.gpu
def test_extreme_gates_stay_finite(device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    gate = torch.tensor([[-3e38, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30, -1e-30]], device=device).bfloat16()
    got = _with_gradients(op.swiglu, gate, torch.ones_like(gate), torch.ones_like(gate))
    truth = _truth(gate, torch.ones_like(gate), torch.ones_like(gate))
    for g, t in zip(got, truth, strict=True):
        torch.testing.assert_close(g.double(), t.double(), rtol=1e-2, atol=1e-30)
