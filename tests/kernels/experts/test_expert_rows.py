"""Rows sorted by expert, scaled and added to: equal to the reference in every combination."""

import itertools

import pytest
import torch

from conftest import rms_error
from kernels.cuda_on_cpu import CpuKernel, copy_sources, has_compiler
from qerl.kernels.experts import expert_rows as op

GIVEN = [dict(zip(("alpha_E", "bias_EN", "plus_SN"), flags, strict=True)) for flags in
         itertools.product((False, True), repeat=3)]  # fmt: skip


def operands(S, E, N, given, rng, dtype, device="cpu"):
    """Return product_SN, the experts with rows (every second one, the last one alone), and what is added."""
    chosen = [*range(0, E - 1, 2), E - 1]
    cuts = sorted(torch.randperm(S - 1, generator=rng)[: len(chosen) - 1].add(1).tolist())
    ends = [*cuts, S]
    tensors = {
        "alpha_E": torch.randn(E, generator=rng),
        "bias_EN": torch.randn(E, N, generator=rng).to(dtype),
        "plus_SN": torch.randn(S, N, generator=rng).to(dtype),
    }
    added = {name: t.to(device) if given[name] else None for name, t in tensors.items()}
    return torch.randn(S, N, generator=rng).to(device, dtype), chosen, ends, added


def ints(numbers, device="cpu"):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "".join(name[0] for name in given if given[name]))
def test_every_combination_is_the_references(given, in_place, rng):
    for S, E, N in op.CASES[:2]:
        product_SN, chosen, ends, added = operands(S, E, N, given, rng, torch.float32)
        want = op.reference(product_SN, chosen, ends, *added.values())
        out = product_SN if in_place else torch.full_like(product_SN, float("nan"))
        op.scale_and_add(product_SN, ints(chosen), ints(ends), **added, out=out)
        assert rms_error(out, want) < 1e-6


@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_the_kernels_source_rounds_once_on_a_cpu(rng, tmp_path, monkeypatch):
    copy_sources(tmp_path)
    kernel = CpuKernel("expert_rows.cu", "scale_and_add", {}, tmp_path)
    monkeypatch.setattr(op.row_kernel, "are_vectors", lambda *tensors: True)
    monkeypatch.setattr(op.row_kernel, "kernel", lambda file, name, device: kernel)
    for given, (S, E, N), in_place in ((GIVEN[7], (4, 4, 64), False), (GIVEN[5], (3, 2, 2056), True)):
        product_SN, chosen, ends, added = operands(S, E, N, given, rng, torch.bfloat16)
        want = op.reference(product_SN, chosen, ends, *added.values())
        out = product_SN if in_place else torch.full_like(product_SN, float("nan"))
        op.scale_and_add(product_SN, ints(chosen), ints(ends), **added, out=out)
        assert rms_error(out, want) <= 1.01 * rms_error(want.bfloat16(), want) + 1e-7


@pytest.mark.gpu
@pytest.mark.parametrize("case", op.CASES)
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "".join(name[0] for name in given if given[name]))
def test_the_kernel_rounds_once(given, case, rng, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    product_SN, chosen, ends, added = operands(*case, given, rng, torch.bfloat16, device)
    want = op.reference(product_SN, chosen, ends, *added.values())
    for out in (torch.full_like(product_SN, float("nan")), product_SN):
        op.scale_and_add(product_SN, ints(chosen, device), ints(ends, device), **added, out=out)
        assert rms_error(out, want) <= 1.01 * rms_error(want.bfloat16(), want) + 1e-7
