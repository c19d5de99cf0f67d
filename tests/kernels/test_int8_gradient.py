import pytest
import torch

from conftest import rms_error
from qerl.kernels import fused_linear, row_kernel
from qerl.kernels import int8_gradient as op
from qerl.kernels.fused_linear import Adapter, LinearPart, RotatedOperand

# What torch says when a backward pass is the first to use cuBLAS on its thread.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
GPU_CASES = (*op.CASES, (1, 64, 8), (257, 4608, 3584), (129, 3584, 1544))


def _case(T, N, K, dtype, device, rng):
    dy, w = torch.randn(T, N, generator=rng), torch.randn(N, K, generator=rng) * N**-0.5
    factors, plus = torch.rand(N, generator=rng) + 0.5, torch.randn(T, K, generator=rng)
    return dy.to(device, dtype), w.to(device, dtype), factors.to(device), plus.to(device, dtype)


def _gradient(dy, w, factors, plus):
    rotation = op.rotation_of(w, factors)
    return op.input_gradient(dy, op.RotatedWeight(rotation.codes(w), rotation), plus)


def test_the_rotation_is_its_own_inverse():
    r = op.hadamard(torch.device("cpu"))
    assert torch.equal(r, r.T) and torch.equal((r @ r), torch.eye(64, dtype=torch.float64))


@pytest.mark.parametrize(("T", "N", "K"), op.CASES)
def test_rounding_is_all_that_differs_from_the_definition(T, N, K, rng):
    """A uniform error of half a 127th of the largest number, which is 3 to 4.5 times the root mean square."""
    dy, w, factors, plus = _case(T, N, K, torch.float32, "cpu", rng)
    got, want = _gradient(dy, w, factors, None), op.reference(dy, w, factors, None)
    assert 0.006 < rms_error(got, want) < 0.016
    assert rms_error(_gradient(dy, w, factors, plus), got.double() + plus) < 1e-6


def test_outliers_cost_no_more_than_other_numbers(rng):
    """Without the rotation, a number 50 times the others takes all but 3 bits of the row's."""
    dy, w, factors, _ = _case(40, 1152, 320, torch.float32, "cpu", rng)
    dy[:, 100] *= 50
    assert rms_error(_gradient(dy, w, factors, None), op.reference(dy, w, factors, None)) < 0.03
    plain = (dy * 127 / dy.abs().amax(1, True)).round() * dy.abs().amax(1, True) / 127
    assert rms_error(plain[:, :100], dy[:, :100]) > 0.1


def test_rows_and_columns_of_zeros_give_zeros(rng):
    dy, w, factors, _ = _case(3, 64, 8, torch.float32, "cpu", rng)
    dy[1], w[:, 2] = 0, 0
    dx = _gradient(dy, w, factors, None)
    assert not dx[1].any() and not dx[:, 2].any() and dx[0, 0] != 0


def test_a_fused_linear_gets_it_for_its_input_and_nothing_else(rng):
    """Two linears with an alpha each, one for its rows; the adapters' gradients keep their bits."""
    x, w = torch.randn(9, 64, generator=rng).bfloat16(), torch.randn(128, 64, generator=rng).bfloat16()
    alphas = 0.25, torch.rand(64, generator=rng) + 0.5
    a, b = (torch.randn(shape, generator=rng).bfloat16() for shape in ((8, 64), (64, 8)))
    parts = [LinearPart(64, alpha, None, Adapter(a.float(), b.float(), a, b, 0.5)) for alpha in alphas]
    dy = torch.randn(9, 128, generator=rng).bfloat16()

    def operand(dtype, has_b):
        wide = row_kernel.rows(128, 64, 16 if has_b else 0, w).copy_(w)
        return fused_linear.widened(wide, parts) if has_b else wide

    factors = torch.cat([torch.full((64,), 0.25), alphas[1]])
    rotation = op.rotation_of(w, factors)
    rotated = RotatedOperand(operand, lambda: op.RotatedWeight(rotation.codes(w), rotation))
    found = []
    for each in (operand, rotated):
        leaves = [x.clone().requires_grad_()]
        for part in parts:
            leaves += [m.requires_grad_() for m in (part.adapter.a_RK, part.adapter.b_NR)]
        y = torch.cat(fused_linear.fused_linear(leaves[0], each, parts), 1)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    (y, dx, *masters), (got_y, got_dx, *got_masters) = found
    assert torch.equal(y, got_y) and all(map(torch.equal, masters, got_masters))
    assert 0.002 < rms_error(got_dx, dx) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("has_plus", (False, True))
@pytest.mark.parametrize(("T", "N", "K"), GPU_CASES)
def test_the_kernels_round_as_the_cpu_does(T, N, K, has_plus, device, rng):
    """dx is the CPU's but for bf16's rounding, and for codes on the edge between two integers."""
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = _case(T, N, K, torch.bfloat16, "cpu", rng)
    if not has_plus:
        case = *case[:3], None
    want = _gradient(*(None if x is None else x.float() for x in case))
    got = _gradient(*(None if x is None else x.to(device) for x in case))
    assert rms_error(got.cpu(), want) < 0.002  # bf16's own is 0.0017
    truth = op.reference(*case)
    assert rms_error(got.cpu(), truth) <= 1.1 * max(rms_error(want, truth), 0.0017)


@pytest.mark.gpu
def test_rows_with_columns_behind_them_are_read_and_written_in_place(device, rng):
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    dy, w, factors, plus = _case(130, 576, 192, torch.bfloat16, device, rng)
    want = _gradient(dy, w, factors, plus.clone())
    wide_dy, wide_w, wide_plus = (row_kernel.rows(*x.shape, 40, x).copy_(x) for x in (dy, w, plus))
    got = _gradient(wide_dy, wide_w, factors, wide_plus)
    assert torch.equal(got, want) and got.data_ptr() == wide_plus.data_ptr()
