"""A factor for each column: equal to the reference, in one rounding, and nothing else is written."""

import pytest
import torch

from conftest import rms_error
from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.linear import scale_columns as op


def _case(T, N, dtype, device, rng, *, bias):
    x, factors = torch.randn(T, N, generator=rng), torch.rand(N, generator=rng) + 0.01
    bias_N = torch.randn(N, generator=rng).to(device, dtype) if bias else None
    return x.to(device, dtype), factors.to(device), bias_N


def _check(T, N, bias, dtype, device, rng):
    """Also in rows that lie apart, as a part's columns do, and in place."""
    x, factors, bias_N = _case(T, N, dtype, device, rng, bias=bias)
    want = op.reference(x, factors, bias_N)
    once = 1e-6 if dtype == torch.float32 else 1.01 * rms_error(want.to(dtype), want) + 1e-7
    whole = torch.full((T, N + 16), 7.0, dtype=dtype, device=device)
    assert op.scale_columns(x, factors, bias_N, out=whole[:, 8:-8]).data_ptr() == whole[:, 8:].data_ptr()
    assert rms_error(whole[:, 8:-8], want) <= once
    assert (whole[:, :8] == 7).all() and (whole[:, -8:] == 7).all()
    op.scale_columns(x, factors, bias_N, out=x)
    assert torch.equal(x, whole[:, 8:-8])


def _check_sum(T, N, bias, device, rng):
    x, factors, bias_N = _case(T, N, torch.float32, device, rng, bias=bias)
    bias_N = None if bias_N is None else bias_N.bfloat16()
    h = torch.randn(T, N, generator=rng).to(device)
    want = h.double() + op.reference(x, factors, bias_N)
    assert op.add_scaled(h, x, factors, bias_N) is h and rms_error(h, want) < 1e-6


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("T", "N"), op.CASES)
def test_columns_are_multiplied_and_moved_by_their_own_numbers(T, N, bias, device, rng):
    _check(T, N, bias, torch.float32, device, rng)
    _check_sum(T, N, bias, device, rng)
    if device.type == "cuda":
        _check(T, N, bias, torch.bfloat16, device, rng)


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_the_kernels_source_does_so_on_a_cpu(rng, tmp_path, monkeypatch):
    copy_sources(tmp_path)
    kernels = {name: CpuKernel("scale_columns.cu", name, {}, tmp_path) for name in NAMES}
    monkeypatch.setattr(op.row_kernel, "are_vectors", lambda *tensors, dtype=None: True)
    monkeypatch.setattr(op.row_kernel, "kernel", lambda file, name, device: kernels[name])
    for T, N, bias in ((1, 8, True), (5, 96, False), (9, 2056, True)):
        _check(T, N, bias, torch.bfloat16, torch.device("cpu"), rng)
        _check_sum(T, N, bias, torch.device("cpu"), rng)


NAMES = "scale_columns", "add_scaled"
