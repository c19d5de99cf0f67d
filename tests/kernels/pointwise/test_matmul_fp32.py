import pytest
import torch

from conftest import rms_error
from qerl.kernels.pointwise import matmul_fp32 as op


def _operands(M, K, N, batch, device, rng):
    a = torch.randn(*batch, M, K, generator=rng).to(device, torch.bfloat16)
    b_NK = torch.randn(*batch, N, K, generator=rng).to(device, torch.bfloat16)
    return a, b_NK.transpose(-1, -2)


@pytest.mark.parametrize("batch", ((), (3,)))
@pytest.mark.parametrize(("M", "K", "N"), op.CASES)
def test_a_product_of_bf16_is_not_rounded_to_bf16(M, K, N, batch, device, rng):
    a, b = _operands(M, K, N, batch, device, rng)
    got, truth = op.product(a, b), op.reference(a, b)
    assert got.dtype == torch.float32
    assert (got - truth).abs().max() <= 2**-16 * truth.abs().max()
    assert rms_error(a @ b, truth) > 2**-10  # what it would be


@pytest.mark.parametrize("batch", ((), (3,)))
def test_a_product_of_fp32_is_torchs_own(batch, device, rng):
    a, b = (x.float() for x in _operands(5, 64, 33, batch, device, rng))
    assert torch.equal(op.product(a, b), a @ b)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("M", "K", "N"), [case for case in op.CASES if case[2] < 1000])
def test_a_product_is_added_to_a_sum_unrounded_and_in_its_place(M, K, N, dtype, device, rng):
    a, b = (x.to(dtype) for x in _operands(M, K, N, (), device, rng))
    total = torch.randn(M, N, generator=rng).to(device) * 1e3
    truth = total.double() + 0.5 * op.reference(a, b)
    got = op.add_product(total, a, b, 0.5)
    assert got is total and got.dtype == torch.float32
    assert rms_error(got, truth) < 1e-6
    side_by_side = torch.full((M, 2 * N), float("nan"), device=device)
    op.add_product(side_by_side[:, N:], a, b, 0.5, beta=0)
    assert rms_error(side_by_side[:, N:], 0.5 * op.reference(a, b)) < 1e-5
    assert side_by_side[:, :N].isnan().all()
