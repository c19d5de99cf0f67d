"""Heads normed and rotated in one launch: the bits of norm and rotation one after the other."""

import pytest
import torch

from conftest import rms_error
from kernels.cuda_on_cpu import has_compiler, on_cpu
from qerl.kernels.attention import head_norm as op
from qerl.kernels.attention import rotary
from qerl.kernels.linear.fused_linear import side_by_side
from qerl.kernels.pointwise.rms_norm import rms_norm
from qerl.kernels.runtime import row_kernel
from qerl.models.rope import cosine_sine


def _case(T, N, K, H, has_norms, device, rng):
    """Columns q | k | v of one tensor, their norms, angles, and gradients of the result."""
    qkv = torch.randn(T, (N + 2 * K) * H, generator=rng).bfloat16().to(device)
    frequencies = 10_000.0 ** -(torch.arange(0, H, 2) / H)
    angles = [x.to(device) for x in cosine_sine(torch.arange(T) * 3, frequencies, 1.0)]
    weights = [(1 + 0.1 * torch.randn(H, generator=rng)).to(device) for _ in range(2)]
    norms = op.HeadNorms(*weights, 1e-6) if has_norms else None
    seen = [torch.randn(T, n, H, generator=rng).bfloat16().to(device) for n in (N, K, K)]
    return qkv, norms, angles, seen


def _run(function, qkv, widths, seen):
    """The results, and the gradient of all columns."""
    columns = [x.detach().requires_grad_() for x in qkv.split(widths, 1)]
    with torch.enable_grad():
        found = function(*columns)
    gradients = torch.autograd.grad(found, columns, [d.to(y.dtype) for d, y in zip(seen, found, strict=True)])
    return [y.detach() for y in found], gradients


def _one_by_one(norms, angles):
    def function(q, k, v):
        heads = [x.unflatten(1, (-1, angles[0].shape[-1])) for x in (q, k, v)]
        if norms is not None:
            for i in range(2):
                heads[i] = rms_norm(heads[i], norms[i], None, norms.eps, dtype=torch.bfloat16)
        return *(rotary.rotate(x, *angles) for x in heads[:2]), heads[2]

    return function


def _truth(norms, angles):
    weights, eps = ((None, None), 0.0) if norms is None else (norms[:2], norms.eps)

    def function(q, k, v):
        return *(
            op.reference(x, w, eps, *angles) for x, w in zip((q, k), weights, strict=True)
        ), v.double().unflatten(1, (-1, angles[0].shape[-1]))

    return function


@pytest.mark.parametrize("has_norms", (False, True))
@pytest.mark.parametrize("case", op.CASES[:2])
def test_the_kernels_arithmetic_is_the_definition(case, has_norms, rng, tmp_path, monkeypatch):
    if not has_compiler():
        pytest.skip("needs g++")
    monkeypatch.setattr(op, "_has_kernel", lambda *given: True)
    row_kernel.kernel.cache_clear()
    with on_cpu(row_kernel, tmp_path):
        _check(case, has_norms, torch.device("cpu"), rng)
    row_kernel.kernel.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("has_norms", (False, True))
@pytest.mark.parametrize("case", op.CASES)
def test_on_a_gpu_the_bits_are_those_of_norm_and_rotation(case, has_norms, rng, device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    found, wanted = _check(case, has_norms, device, rng)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _check(case, has_norms, device, rng):
    """Return values and gradients, and those of the kernels one by one."""
    _, N, K, H = case
    qkv, norms, angles, seen = _case(*case, has_norms, device, rng)
    widths = [N * H, K * H, K * H]
    one, turned = _one_by_one(norms, angles), lambda q, k, v: op.turned_heads(q, k, v, norms, *angles)
    ours, theirs, truth = (_run(f, qkv, widths, seen) for f in (turned, one, _truth(norms, angles)))
    first, *_ = ours[1]
    whole = side_by_side(ours[1])
    assert whole.shape == qkv.shape and whole.data_ptr() == first.data_ptr()  # nothing was copied
    for mine, other, true in zip(*([*y, *d] for y, d in (ours, theirs, truth)), strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == other.shape
        assert rms_error(mine, true) <= 1.1 * rms_error(other, true) + 1e-9
    return [*ours[0], *ours[1]], [*theirs[0], *theirs[1]]


@pytest.mark.parametrize("has_norms", (False, True))
def test_without_the_kernel_it_is_norm_and_rotation(has_norms, rng):
    case = op.CASES[0]
    qkv, norms, angles, seen = _case(*case, has_norms, torch.device("cpu"), rng)
    _, N, K, H = case
    found, wanted = (
        _run(f, qkv, [N * H, K * H, K * H], seen)
        for f in (lambda q, k, v: op.turned_heads(q, k, v, norms, *angles), _one_by_one(norms, angles))
    )
    assert all(
        torch.equal(a, b)
        for mine, other in zip(found, wanted, strict=True)
        for a, b in zip(mine, other, strict=True)
    )
