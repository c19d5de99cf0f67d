import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from qerl.kernels.pointwise import swiglu as op
from qerl.kernels.runtime import row_kernel


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


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("T", "width"), op.CASES)
def test_halves_of_one_tensor_are_gate_and_up(T, width, dtype, device, rng):
    gate, up, dy = _case(T, width, dtype, device, rng)
    y, *gradients = _with_gradients(op.swiglu, gate, up, dy)
    gate_up = torch.cat((gate, up), 1).requires_grad_()
    halves = op.swiglu_halves(gate_up)
    assert torch.equal(halves, y)
    assert torch.equal(torch.autograd.grad(halves, gate_up, dy.to(dtype))[0], torch.cat(gradients, 1))


def _wide(gate, up, dy, dtype, room=0):
    """Value, dgate, dup, and the gate that was kept."""
    T, width = gate.shape
    y = row_kernel.rows(T, width, room, gate, dtype)
    kept = torch.empty(T, width, dtype=dtype, device=gate.device)
    op.put_swiglu(torch.cat((gate, up), 1), y, kept)
    return y, *op.wide_gradient(dy.to(dtype), kept, y).chunk(2, 1), kept


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("T", "width"), op.CASES)
def test_factors_of_the_columns_multiply_gate_and_up_first(T, width, dtype, device, rng):
    wide = torch.randn(T, 2 * width, generator=rng).to(device)
    factors = torch.rand(2 * width, generator=rng).to(device)
    found = []
    for given, own in ((wide * factors, None), (wide, factors)):
        y, kept = (torch.empty(T, width, dtype=dtype, device=device) for _ in range(2))
        op.put_swiglu(given, y, kept, own)
        found.append((y, kept))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("room", (0, 24))
@pytest.mark.parametrize(("T", "width"), op.CASES)
def test_a_wide_gate_and_its_result_stand_for_up(T, width, room, device, rng):
    case = _case(T, width, torch.float32, device, rng)
    case[2].copy_(case[2].bfloat16())
    truth = _truth(*case)
    for got, want in zip(_wide(*case, torch.float32), truth, strict=False):
        assert rms_error(got, want) < 1e-5
    half = (x.bfloat16() for x in case)
    plain = _with_gradients(lambda gate, up: F.silu(gate) * up, *half)
    for got, theirs, want in zip(_wide(*case, torch.bfloat16, room), plain, truth, strict=False):
        assert got.dtype == torch.bfloat16
        assert rms_error(got, want) <= 1.1 * rms_error(theirs, want)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_small_gates_lose_no_gradient_and_large_ones_stay_finite(dtype, device):
    """dgate to three roundings to 16 bits each, where up comes back from a result of 1e-19 too."""
    sizes = (0.0, 1e-40, 1e-30, 2.0**-60, 1e-17, 1e-9, 1e-4, 0.03, 1.2, 20.0, 80.0, 88.0, 100.0, 3e4, 1e30)
    gate = torch.tensor([*sizes, *(-size for size in sizes), 0.5, -0.5], device=device)[None]
    up = torch.tensor([3.7, -1e-6, 5e3, 0.01], device=device).repeat(8)[None]
    y, dgate, dup, kept = _wide(gate, up, torch.ones_like(gate), dtype)
    assert (
        kept.abs().min() == 2.0**-60 and (y.double() - op.reference(gate, up)).abs()[gate == 0].max() < 5e-15
    )
    truth = _truth(gate.to(dtype), up, torch.ones_like(gate))
    torch.testing.assert_close(dup.double(), truth[2].double(), rtol=6e-3, atol=1e-15)
    torch.testing.assert_close(dgate.double(), truth[1].double(), rtol=0.02, atol=1e-30)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_what_is_no_number_stays_none(dtype, device):
    gate, up = torch.ones(2, 8, device=device), torch.ones(2, 8, device=device)
    gate[0, 3] = up[1, 5] = torch.nan
    y, dgate, dup, kept = _wide(gate, up, torch.ones_like(gate), dtype)
    assert torch.equal(y.isnan(), gate.isnan() | up.isnan()) and torch.equal(dgate.isnan(), y.isnan())
    assert torch.equal(kept.isnan(), gate.isnan()) and torch.equal(dup.isnan(), gate.isnan())


@pytest.mark.gpu
def test_extreme_gates_stay_finite(device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    gate = torch.tensor([[-3e38, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30, -1e-30]], device=device).bfloat16()
    got = _with_gradients(op.swiglu, gate, torch.ones_like(gate), torch.ones_like(gate))
    truth = _truth(gate, torch.ones_like(gate), torch.ones_like(gate))
    for g, t in zip(got, truth, strict=True):
        torch.testing.assert_close(g.double(), t.double(), rtol=1e-2, atol=1e-30)
