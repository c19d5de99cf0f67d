import itertools

import pytest
import torch

from conftest import rms_error
from qerl.kernels.attention import tree_attention as op
from qerl.types import Tree


def _forest(shapes):
    trees = []
    for prompt_tokens, branch_tokens in shapes:
        start = trees[-1].start + trees[-1].num_tokens if trees else 0
        trees.append(Tree(start=start, prompt_tokens=prompt_tokens, branch_tokens=branch_tokens))
    return trees, trees[-1].start + trees[-1].num_tokens


def _random(rng, device, dtype, *shapes):
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


def _value_and_gradients(function, operands, do_TNH):
    operands = [x.detach().requires_grad_() for x in operands]
    o_TNH = function(*operands)
    return [o_TNH, *torch.autograd.grad(o_TNH, operands, do_TNH.to(o_TNH.dtype))]


def _case(N, K, H, shapes, device, dtype, rng):
    trees, T = _forest(shapes)
    return trees, _random(rng, device, dtype, (T, N, H), (T, K, H), (T, K, H), (T, N, H))


def _truth(trees, q, k, v, do):
    return _value_and_gradients(lambda q, k, v: op.reference(q, k, v, trees), (q, k, v), do)


def _run_by_run(q_TNH, k_RKH, v_RKH, run_ends):
    """Compute what FlashAttention computes, run by run."""
    parts, group = [], q_TNH.shape[1] // k_RKH.shape[1]
    k_RNH, v_RNH = (x.repeat_interleave(group, 1) for x in (k_RKH, v_RKH))
    ends = list(zip(run_ends.queries.tolist(), run_ends.keys.tolist(), strict=True))
    for (q0, k0), (q1, k1) in itertools.pairwise(ends):
        scores = torch.einsum("tnh,snh->nts", q_TNH[q0:q1], k_RNH[k0:k1]) * q_TNH.shape[2] ** -0.5
        hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q_TNH.device).triu(
            k1 - k0 - (q1 - q0) + 1
        )
        p_NTS = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(q_TNH.dtype)
        parts.append(torch.einsum("nts,snh->tnh", p_NTS, v_RNH[k0:k1]))
    assert max(b[0] - a[0] for a, b in itertools.pairwise(ends)) == run_ends.max_queries
    assert max(b[1] - a[1] for a, b in itertools.pairwise(ends)) == run_ends.max_keys
    return torch.cat(parts)


@pytest.mark.parametrize("case", op.CASES)
def test_attention_over_the_runs_is_the_definition(case, device, rng):
    trees, (q, k, v, do) = _case(*case, device, torch.float32, rng)
    layout = op.TreeLayout.of(trees, device)
    got = _value_and_gradients(lambda *x: op.over_runs(*x, layout, _run_by_run), (q, k, v), do)
    for ours, theirs in zip(got, _truth(trees, q, k, v, do), strict=True):
        assert rms_error(ours, theirs) < 1e-6


@pytest.mark.parametrize("case", op.CASES)
def test_fp32_value_and_gradients_are_the_definitions(case, device, rng):
    trees, (q, k, v, do) = _case(*case, device, torch.float32, rng)
    layout = op.TreeLayout.of(trees[::-1], device)
    got = _value_and_gradients(lambda *x: op.tree_attention(*x, layout), (q, k, v), do)
    for ours, theirs in zip(got, _truth(trees, q, k, v, do), strict=True):
        assert rms_error(ours, theirs) < 1e-6


def test_what_torch_was_told_of_determinism_stays(device):
    trees, (q, k, v, do) = _case(*op.CASES[1], device, torch.float32, torch.Generator().manual_seed(0))
    layout = op.TreeLayout.of(trees, device)

    def told():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before, inside = told(), []

    def watched(*operands):
        operands[0].register_hook(lambda _: inside.append(told()))
        return _run_by_run(*operands)

    _value_and_gradients(lambda *x: op.over_runs(*x, layout, watched), (q, k, v), do)
    assert told() == before and inside == [(True, False)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", op.CASES)
def test_on_a_gpu_bf16_loses_no_more_than_eager_attention(case, device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    trees, (q, k, v, do) = _case(*case, device, torch.bfloat16, rng)
    layout, truth = op.TreeLayout.of(trees, device), _truth(trees, q, k, v, do)
    eager = _value_and_gradients(lambda *x: op.over_runs(*x, layout, _run_by_run), (q, k, v), do)
    ours = _value_and_gradients(lambda *x: op.tree_attention(*x, layout), (q, k, v), do)
    for got, theirs, exact in zip(ours, eager, truth, strict=True):
        assert got.dtype == torch.bfloat16
        assert rms_error(got, exact) <= 1.1 * rms_error(theirs, exact)


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_the_same_bits_each_time(device, rng):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    trees, (q, k, v, do) = _case(
        28, 4, 128, ((200, (700,) * 6), (100, (900, 5))), device, torch.bfloat16, rng
    )
    layout = op.TreeLayout.of(trees, device)
    first, *others = (
        _value_and_gradients(lambda *x: op.tree_attention(*x, layout), (q, k, v), do) for _ in range(5)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
