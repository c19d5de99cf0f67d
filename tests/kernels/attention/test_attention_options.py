"""Scales, soft caps, windows and sinks: every path against the definition in float64."""

import pytest
import torch

from conftest import rms_error
from kernels.attention.test_attention import _forest, _random, _value_and_gradients
from qerl.kernels.attention import attention as op
from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.attention.chunked_attention import chunked_decode
from qerl.kernels.attention.tree_attention import TreeLayout, tree_attention
from qerl.kernels.head.logprob import Softcap, chunked_logprob

N, K, H = 6, 2, 16
SHAPES = ((6, ()), (9, ()), (5, (3, 0, 9)), (12, (1,)), (1, (1, 1, 1, 1)), (260, (20, 2)))
SINKS = torch.linspace(-1, 3, N)
OPTIONS = {
    "scale": AttentionOptions(scale=0.7),
    "softcap": AttentionOptions(softcap=1.5),
    "window 2": AttentionOptions(window=2),
    "window 7": AttentionOptions(window=7),
    "window 270": AttentionOptions(window=270),
    "sinks": AttentionOptions(sinks_N=SINKS),
    "all": AttentionOptions(scale=0.4, softcap=2.0, window=4, sinks_N=SINKS),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_value_and_gradients_are_the_definitions(name, rng):
    options, (trees, T) = OPTIONS[name], _forest(SHAPES)
    q, k, v, do = _random(rng, "cpu", torch.float32, (T, N, H), (T, K, H), (T, K, H), (T, N, H))
    layout = TreeLayout.of(trees)
    truth = _value_and_gradients(lambda *x: op.reference(*x, trees, options), (q, k, v), do)
    got = _value_and_gradients(lambda *x: tree_attention(*x, layout, options), (q, k, v), do)
    plain = tree_attention(q, k, v, layout)
    for ours, theirs in zip(got, truth, strict=True):
        assert rms_error(ours, theirs) < 1e-6
    assert rms_error(plain, truth[0]) > 1e-3


@pytest.mark.parametrize("decode", (op.paged_decode, chunked_decode))
@pytest.mark.parametrize("name", OPTIONS)
def test_paged_decoding_is_the_definition(name, decode, rng):
    options, B, X, page_tokens = OPTIONS[name], 4, 41, 8
    q, k, v = _random(rng, "cpu", torch.float32, (B, N, H), (B * X, page_tokens, K, H), (B * X, 8, K, H))
    tables = torch.randperm(B * X, generator=rng).view(B, X)
    lengths = torch.tensor([1, 5, 200, X * page_tokens])
    truth = torch.stack([_row(q[b], k, v, tables[b], int(lengths[b]), options) for b in range(B)])
    assert rms_error(decode(q, k, v, tables, lengths, options), truth) < 1e-6
    seen, left = options.seen_tables(tables, lengths, page_tokens)
    assert rms_error(decode(q, k, v, seen, left, options), truth) < 1e-6
    assert seen.shape[1] == (X if options.window is None else num_pages_seen(options.window, page_tokens, X))


def num_pages_seen(window, page_tokens, most):
    """The most pages that any `window` neighboring positions lie in."""
    spans = ((start + window - 1) // page_tokens + 1 for start in range(page_tokens))
    return min(max(spans), most)


def _row(q_NH, k, v, table_X, length, options):
    """The last query's row, in float64."""
    seen = slice(max(length - (options.window or length), 0), length)
    k_SNH, v_SNH = (
        pages[table_X].flatten(0, 1)[seen].double().repeat_interleave(N // K, 1) for pages in (k, v)
    )
    scores_NS = torch.einsum("nh,snh->ns", q_NH.double(), k_SNH) * (options.scale or H**-0.5)
    if options.softcap is not None:
        scores_NS = options.softcap * (scores_NS / options.softcap).tanh()
    sinks = torch.full((N,), -torch.inf) if options.sinks_N is None else options.sinks_N
    p_NS = torch.cat((scores_NS, sinks.double()[:, None]), -1).softmax(-1)[:, :-1]
    return torch.einsum("ns,snh->nh", p_NS, v_SNH)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_prefill_in_pieces_is_the_definition(name, rng):
    options, lengths, page_tokens = OPTIONS[name], (17, 330), 8
    q, k, v = _random(rng, "cpu", torch.float32, (347, N, H), (90, 8, K, H), (90, 8, K, H))
    order, spans, truth, row = torch.randperm(90, generator=rng), [], [], 0
    for length, first in zip(lengths, (9, 300), strict=True):
        table, order = order.split((-(-length // 8), len(order) - -(-length // 8)))
        n = length - first
        spans.append(op.Span(start_row=row, num_rows=n, first_position=first, table=table))
        rows = [_row(q[row + i], k, v, table, first + i + 1, options) for i in range(n)]
        truth += rows
        row += n
    layout = op.PagedLayout.of(spans, page_tokens, "cpu")
    keys, values = (pages.flatten(0, 1)[layout.key_slots] for pages in (k, v))
    got = op.span_attention(q[:row], keys, values, layout, options)
    assert rms_error(got, torch.stack(truth)) < 1e-6


def test_options_that_change_nothing_change_no_bit(rng):
    trees, T = _forest(SHAPES)
    q, k, v = _random(rng, "cpu", torch.float32, (T, N, H), (T, K, H), (T, K, H))
    layout = TreeLayout.of(trees)
    plain = tree_attention(q, k, v, layout)
    assert torch.equal(tree_attention(q, k, v, layout, AttentionOptions(scale=H**-0.5)), plain)
    assert torch.equal(tree_attention(q, k, v, layout, AttentionOptions(window=1000)), plain)
    assert PLAIN.is_plain and not any(options.is_plain for options in OPTIONS.values())


def test_a_window_skips_the_keys_before_it():
    """The work of long sequences is that of their windows, not of their squares."""
    trees, _ = _forest(((4096, ()),))
    layouts = [op.PackedLayout.of(trees, window=window) for window in (None, 100)]
    scores = [sum(block.mask_B11QS.numel() for block in layout.blocks) for layout in layouts]
    assert scores[1] < 0.25 * scores[0]


@pytest.mark.parametrize("scale", (1.0, 0.25))
def test_capped_logprobs_and_their_gradient_are_the_definitions(scale, rng):
    hidden_TD = torch.randn(23, 16, generator=rng, requires_grad=True)
    head_VD, targets_T = torch.randn(50, 16, generator=rng), torch.randint(50, (23,), generator=rng)
    logits_TV = 3.0 * (scale * hidden_TD.double() @ head_VD.double().T / 3.0).tanh() / 0.7
    all_TV = logits_TV.log_softmax(-1)
    truth_T, entropy_T = all_TV.gather(1, targets_T[:, None])[:, 0], -(all_TV.exp() * all_TV).sum(-1)
    got_T, got_entropy_T = chunked_logprob(
        hidden_TD, head_VD, targets_T, temperature=0.7, chunk_tokens=8, softcap=Softcap(3.0, scale)
    )
    assert rms_error(got_T, truth_T) < 1e-6 and rms_error(got_entropy_T, entropy_T) < 1e-6
    weight_T = torch.randn(23, generator=rng)
    want = torch.autograd.grad((truth_T * weight_T).sum(), hidden_TD)[0]
    assert rms_error(torch.autograd.grad((got_T * weight_T).sum(), hidden_TD)[0], want) < 1e-6
