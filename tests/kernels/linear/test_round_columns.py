"""Columns are rounded one after the other; the kernel rounds them to PyTorch's bits."""

import pytest
import torch

from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.linear import round_columns as op
from qerl.kernels.runtime import row_kernel


def operands(N, K, device, rng):
    """Weights of all codes, ties included, with another base, and feedback of a unit triangular matrix."""
    weight_NK = torch.randn(N, K, generator=rng) * 3
    weight_NK[0, 0] = 2.5
    step_NK = (2.0 ** torch.randint(-3, 2, (N, K // 16), generator=rng)).repeat_interleave(16, dim=1)
    base_NK = weight_NK + 0.1 * torch.randn(N, K, generator=rng)
    feedback_KK = 0.3 * torch.randn(K, K, generator=rng) / K**0.5
    return tuple(x.to(device) for x in (weight_NK, base_NK, step_NK, feedback_KK))


@pytest.mark.parametrize(("N", "K"), op.CASES)
def test_the_rounded_values_are_the_definition_s(N, K, device, rng):
    target_NK, base_NK, step_NK, feedback_KK = operands(N, K, device, rng)
    exact_NK = op.reference(target_NK, base_NK, step_NK, feedback_KK)
    ours_NK = op.round_columns(target_NK.clone(), base_NK, step_NK, feedback_KK)
    assert torch.equal(ours_NK.double(), exact_NK)


def test_what_stays_of_a_column_s_change_goes_to_the_later_ones_alone(device):
    # 2.6 becomes 3, a change of 0.4; half of it is taken off the second column: 1.1 - 0.2 = 0.9 becomes 1
    weight_NK = torch.zeros(1, 16, device=device)
    weight_NK[0, :3] = torch.tensor([2.6, 1.4, 0.2])
    feedback_KK = torch.full((16, 16), 9.0, device=device).triu(1) * 0
    feedback_KK[0, 1], feedback_KK[1, 2], feedback_KK[2, 0] = -0.5, 2.0, 9.0
    ones_NK = torch.ones_like(weight_NK)
    rounded_NK = op.round_columns(weight_NK.clone(), weight_NK, ones_NK, feedback_KK)
    # columns: 3; 1.4 - 0.2 = 1.2 becomes 1, a change of 1 - 1.4 = -0.4; 0.2 + 2 * -0.4 = -0.6 becomes -0.5
    assert rounded_NK[0, :4].tolist() == [3, 1, -0.5, 0]


def check_kernel(N, K, device, rng):
    """One chunk after the other, the kernel rounds to the same bits and reports the same changes."""
    target_NK, base_NK, step_NK, feedback_KK = operands(N, K, device, rng)
    for start in range(0, K, 128):
        chunk = slice(start, start + 128)
        columns = [x[:, chunk] for x in (target_NK, base_NK, step_NK)]
        ours_NK, torchs_NK = (torch.full_like(target_NK, torch.nan) for _ in range(2))
        own = feedback_KK[chunk, chunk]
        change_NC = op._by_kernel(*columns, ours_NK[:, chunk], own)
        expected_NC = op._by_torch(*columns, torchs_NK[:, chunk], own)
        assert torch.equal(change_NC, expected_NC)
        assert torch.equal(ours_NK[:, chunk], torchs_NK[:, chunk])
        assert ours_NK.isnan().sum() == N * (K - change_NC.shape[1])  # nothing beside the chunk


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
@pytest.mark.parametrize(("N", "K"), op.CASES)
def test_its_source_rounds_to_the_same_bits_on_a_cpu(N, K, rng, tmp_path, monkeypatch):
    copy_sources(tmp_path)
    made = lambda file, name, _, **defines: CpuKernel(file, name, defines, tmp_path)  # noqa: E731
    monkeypatch.setattr(row_kernel, "kernel", made)
    check_kernel(N, K, torch.device("cpu"), rng)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [*op.CASES, (1000, 8960)])
def test_the_kernel_rounds_to_the_same_bits(N, K, device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA GPU")
    check_kernel(N, K, device, rng)
