import pytest
import torch

from conftest import rms_error
from qerl.formats import NVFP4, e2m1
from qerl.kernels.linear.round_columns import nearest
from qerl.models.quantize.rounding import add_damping, gram, round_to_grid

N, K, T = 48, 160, 400


def operands(seed=0):
    """A weight on its own grid, a delta far below the grid's steps, and inputs that are correlated."""
    rng = torch.Generator().manual_seed(seed)
    base = NVFP4.encode(torch.randn(N, K, generator=rng))
    delta_NK = 0.03 * torch.randn(N, 4, generator=rng) @ torch.randn(4, K, generator=rng)
    x_TK = torch.randn(T, 16, generator=rng) @ torch.randn(16, K, generator=rng)
    steps_NK = (base.scales.float() / base.global_scale).repeat_interleave(16, dim=1)
    return base.decode(), delta_NK, steps_NK, add_damping(x_TK.T @ x_TK, 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_damping_leaves_the_matrix_that_it_gets_as_it_is(dtype):
    h_KK = torch.eye(3, dtype=dtype)
    damped_KK = add_damping(h_KK, 0.5)
    assert h_KK.equal(torch.eye(3, dtype=dtype)) and damped_KK.equal(1.5 * torch.eye(3).double())


def error(q_NK, target_NK, h_KK):
    e_NK = (q_NK - target_NK).double()
    return ((e_NK @ h_KK) * e_NK).sum().item()


def test_a_weight_on_its_grid_stays_where_it_is():
    base_NK, _, steps_NK, h_KK = operands()
    units_NK = round_to_grid(base_NK, steps_NK, h_KK, sweeps=2)
    assert torch.equal(e2m1.encode(units_NK), e2m1.encode(base_NK / steps_NK))


def test_a_delta_that_nearest_codes_lose_stays_in_the_products():
    base_NK, delta_NK, steps_NK, h_KK = operands()
    target_NK = base_NK + delta_NK
    lost = error(base_NK, target_NK, h_KK)
    assert error(nearest(target_NK, steps_NK), target_NK, h_KK) > 0.5 * lost
    assert error(round_to_grid(target_NK, steps_NK, h_KK, sweeps=2) * steps_NK, target_NK, h_KK) < 0.1 * lost


def test_feeding_errors_forward_lowers_them_and_so_does_each_sweep():
    base_NK, delta_NK, steps_NK, h_KK = operands()
    target_NK = base_NK + delta_NK
    errors = [
        error(round_to_grid(target_NK, steps_NK, h_KK, sweeps=n) * steps_NK, target_NK, h_KK)
        for n in (0, 1, 2)
    ]
    assert 0.3 * error(nearest(target_NK, steps_NK), target_NK, h_KK) > errors[0] > errors[1] > errors[2]


def test_no_single_code_does_better_than_the_last_sweep_s():
    base_NK, delta_NK, steps_NK, h_KK = operands()
    target_NK = base_NK + delta_NK
    q_NK = round_to_grid(target_NK, steps_NK, h_KK, sweeps=50) * steps_NK
    best = error(q_NK, target_NK, h_KK)
    for n, k, step in ((3, 5, 1), (17, 80, -1), (40, 159, 1)):
        other_NK = q_NK.clone()
        other_NK[n, k] = nearest(q_NK[n, k] + step * 0.6 * steps_NK[n, k], steps_NK[n, k])
        assert error(other_NK, target_NK, h_KK) >= best


def test_nearest_is_the_rounding_of_the_format():
    values = torch.linspace(-7, 7, 1121)
    steps = torch.full_like(values, 1.0)
    expected = e2m1.decode(e2m1.encode(torch.stack([values, values], 1)), torch.float32)[:, 0]
    assert torch.equal(nearest(values, steps), expected)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_inputs_that_span_little_are_damped(scale):
    x_TK = scale * torch.ones(1, K)
    torch.linalg.cholesky(add_damping(x_TK.T @ x_TK, 0.01))


def test_an_indefinite_sum_of_inputs_is_damped_more(rng):
    """Sums in float32 can miss a small eigenvalue by more than the damping."""
    x_TK = torch.randn(200, 32, generator=rng)
    h_KK = (x_TK.T @ x_TK).double()
    h_KK -= 1.001 * torch.linalg.eigvalsh(h_KK)[0] * torch.eye(32, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(h_KK.flip(0, 1))
    weight_NK, steps_NK = torch.randn(8, 32, generator=rng), torch.full((8, 32), 0.5)
    q_NK = round_to_grid(weight_NK, steps_NK, h_KK, sweeps=2) * steps_NK
    nearest_NK = round_to_grid(weight_NK, steps_NK, torch.eye(32, dtype=torch.float64), sweeps=0) * steps_NK
    assert error(q_NK, weight_NK, h_KK) < error(nearest_NK, weight_NK, h_KK)


def test_the_sum_over_inputs_is_that_of_float64(rng):
    x_TK = torch.randn(3000, 16, generator=rng)
    want = x_TK.double().T @ x_TK.double()
    assert gram(x_TK).dtype == torch.float64 and rms_error(gram(x_TK), want) < 1e-6
