"""Attention with a scale, a window and sinks by FlashAttention, whose two kernels are imitated on a CPU."""

import functools
import itertools

import pytest
import torch

from conftest import rms_error
from qerl.kernels.attention import flash_attention as op
from qerl.kernels.attention.attention import packed_attention
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.attention.tree_attention import TreeLayout, flash_over_runs, reference, tree_attention
from qerl.types import Tree

CASES = (  # N, K, H, trees as (prompt, branches)
    (4, 4, 16, ((7, ()), (1, ()))),
    (6, 2, 32, ((5, (3, 0, 9)), (12, (1,)), (1, (1, 1, 1, 1)))),
    (14, 2, 64, ((24, (5, 8, 2, 13)), (31, (4, 4)), (70, ()))),  # on a GPU
    (64, 8, 64, ((300, (700,) * 3), (100, (900, 5)))),
)
KINDS = {"scale": (0.31, None), "window": (None, 4), "both": (0.2, 7), "two": (None, 2), "long": (None, 900)}


def options_of(kind, has_sinks, num_heads, device="cpu"):
    scale, window = KINDS[kind]
    sinks_N = torch.linspace(-1, 3, num_heads, device=device) if has_sinks else None
    return AttentionOptions(scale=scale, window=window, sinks_N=sinks_N)


def trees_of(shapes):
    trees, start = [], 0
    for prompt_tokens, branch_tokens in shapes:
        trees.append(Tree(start=start, prompt_tokens=prompt_tokens, branch_tokens=branch_tokens))
        start += trees[-1].num_tokens
    return trees, start


def weights(q_TNH, k_RNH, lse_NT, ends, is_causal, scale, left, right):
    """Yield (rows, key rows, p_NTS = exp(s - lse)) of each sequence; with lse None, its own."""
    assert right == 0 and is_causal == (left == -1)
    for (q0, k0), (q1, k1) in itertools.pairwise(zip(*ends, strict=True)):
        s_NTS = torch.einsum("tnh,snh->nts", q_TNH[q0:q1], k_RNH[k0:k1])
        s_NTS = s_NTS * (q_TNH.shape[2] ** -0.5 if scale is None else scale)
        places = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None] - (k1 - k0 - (q1 - q0))
        hidden = places > 0 if left == -1 else (places > 0) | (places < -left)
        s_NTS = s_NTS.masked_fill(hidden, float("-inf"))
        own = s_NTS.logsumexp(-1) if lse_NT is None else lse_NT[:, q0:q1]
        yield slice(q0, q1), slice(k0, k1), (s_NTS - own[..., None]).exp(), own


def per_head(x_RKH, like_TNH):
    return x_RKH.repeat_interleave(like_TNH.shape[1] // x_RKH.shape[1], 1)


def imitated_forward(q, k, v, ends_q, ends_k, max_q, max_k, dropout, is_causal, debug, *, scale, **window):
    assert dropout == 0 and not debug and max_q > 1
    sizes = (ends_q.tolist(), ends_k.tolist()), is_causal, scale, *window.values()
    o, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    for rows, keys, p_NTS, own_NT in weights(q, per_head(k, q), None, *sizes):
        o[rows] = torch.einsum("nts,snh->tnh", p_NTS, per_head(v, q)[keys])
        lse[:, rows] = own_NT
    return o, lse, torch.zeros(2), torch.zeros(0), torch.zeros(0)


def imitated_backward(
    do, q, k, v, o, lse, ends_q, ends_k, max_q, max_k, dropout, is_causal, state, unused, *, scale, **window
):
    """What the kernel computes from o and lse, which it takes as they are given."""
    sizes = (ends_q.tolist(), ends_k.tolist()), is_causal, scale, *window.values()
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(per_head(k, q)), torch.zeros_like(per_head(k, q))
    delta_NT = (do * o).sum(-1).T
    for rows, keys, p_NTS, _ in weights(q, per_head(k, q), lse, *sizes):
        dp_NTS = torch.einsum("tnh,snh->nts", do[rows], per_head(v, q)[keys])
        ds_NTS = p_NTS * (dp_NTS - delta_NT[:, rows, None]) * (q.shape[2] ** -0.5 if scale is None else scale)
        dq[rows] = torch.einsum("nts,snh->tnh", ds_NTS, per_head(k, q)[keys])
        dk[keys] = torch.einsum("nts,tnh->snh", ds_NTS, q[rows])
        dv[keys] = torch.einsum("nts,tnh->snh", p_NTS, do[rows])
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


@pytest.fixture
def imitated(monkeypatch):
    monkeypatch.setattr(op, "_forward", imitated_forward)
    monkeypatch.setattr(op, "_backward", imitated_backward)


def value_and_gradients(function, operands, do_TNH):
    operands = [x.detach().requires_grad_() for x in operands]
    o_TNH = function(*operands)
    return [o_TNH, *torch.autograd.grad(o_TNH, operands, do_TNH.to(o_TNH.dtype))]


def operands_of(case, dtype, rng, device="cpu"):
    N, K, H, shapes = case
    trees, T = trees_of(shapes)
    tensors = [torch.randn(T, n, H, generator=rng).to(device, dtype) for n in (N, K, K, N)]
    return trees, tensors[:3], tensors[3]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("kind", "case"), [*((kind, CASES[1]) for kind in KINDS), ("both", CASES[0])])
def test_value_and_gradients_are_the_definitions(case, kind, has_sinks, imitated, rng):
    trees, operands, do = operands_of(case, torch.float64, rng)
    options = options_of(kind, has_sinks, case[0])
    layout = TreeLayout.of(trees)

    got = value_and_gradients(lambda q, k, v: flash_over_runs(q, k, v, layout, options), operands, do)
    truth = value_and_gradients(lambda q, k, v: reference(q, k, v, trees, options), operands, do)
    for ours, theirs in zip(got, truth, strict=True):
        assert rms_error(ours, theirs) < 1e-6  # the sinks are fp32


@pytest.mark.parametrize("kind", ["scale", "window"])
def test_only_runs_without_a_window_are_split(kind, imitated, rng, monkeypatch):
    trees, operands, do = operands_of(CASES[1], torch.float64, rng)
    layout, asked = TreeLayout.of(trees), []
    monkeypatch.setattr(TreeLayout, "split_runs", lambda self, heads: asked.append(heads) or self.runs)
    options = options_of(kind, False, CASES[1][0])
    value_and_gradients(lambda q, k, v: flash_over_runs(q, k, v, layout, options), operands, do)
    assert asked == ([] if kind == "window" else [CASES[1][0]])


def test_it_is_chosen_for_all_but_soft_caps_and_wide_heads():
    assert op.is_for_flash(128, AttentionOptions()) and not op.is_for_flash(320, AttentionOptions())
    assert op.is_for_flash(64, options_of("both", True, 4))
    assert not op.is_for_flash(64, AttentionOptions(softcap=30.0))


@pytest.mark.gpu
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_bf16_loses_no_more_than_plain_operations(case, kind, has_sinks, device, rng, monkeypatch):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr("qerl.kernels.attention.tree_attention.is_for_flash_4", lambda *_: False)
    trees, operands, do = operands_of(case, torch.bfloat16, rng, device)
    options = options_of(kind, has_sinks, case[0], device)
    layout = TreeLayout.of(trees, device)
    plain = functools.partial(packed_attention, layout=layout.windowed(options.window), options=options)
    truth = value_and_gradients(plain, [x.float() for x in operands], do)
    eager = value_and_gradients(plain, operands, do)
    ours, again = (
        value_and_gradients(lambda q, k, v: tree_attention(q, k, v, layout, options), operands, do)
        for _ in range(2)
    )
    for got, same, theirs, true in zip(ours, again, eager, truth, strict=True):
        assert torch.equal(got, same)
        assert rms_error(got, true) <= 1.5 * rms_error(theirs, true) + 2**-9
