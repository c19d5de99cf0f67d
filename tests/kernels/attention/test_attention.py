import pytest
import torch
import torch.nn.functional as F

from conftest import rms_error
from qerl.kernels.attention import attention as op
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
    q, k, v, do = _random(rng, device, dtype, (T, N, H), (T, K, H), (T, K, H), (T, N, H))
    layout = op.PackedLayout.of(trees, device)
    truth = _value_and_gradients(lambda q, k, v: op.reference(q, k, v, trees), (q, k, v), do)
    got = _value_and_gradients(lambda q, k, v: op.packed_attention(q, k, v, layout), (q, k, v), do)
    return trees, (q, k, v, do), got, truth


@pytest.mark.parametrize("case", op.CASES)
def test_fp32_value_and_gradients_are_the_definitions(case, device, rng):
    *_, got, truth = _case(*case, device, torch.float32, rng)
    for ours, theirs in zip(got, truth, strict=True):
        assert rms_error(ours, theirs) < 1e-6


def _mask(trees, T, device):
    seen_TT = torch.zeros(T, T, dtype=torch.bool, device=device)
    for tree in trees:
        end = tree.start + tree.num_tokens
        seen_TT[tree.start : end, tree.start : end] = True
        first = tree.start + tree.prompt_tokens
        for length in tree.branch_tokens:
            seen_TT[first : first + length, tree.start + tree.prompt_tokens : first] = False
            first += length
    seen_TT &= torch.ones_like(seen_TT).tril()
    return seen_TT


def _fused(q_TNH, k_TKH, v_TKH, seen_TT):
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_TKH, v_TKH))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TT, enable_gqa=True)[0].transpose(0, 1)


def _eager(q_TNH, k_TKH, v_TKH, seen_TT):
    """As transformers does it: scores in 16 bits, softmax in fp32."""
    k_TNH, v_TNH = (x.repeat_interleave(q_TNH.shape[1] // x.shape[1], 1) for x in (k_TKH, v_TKH))
    scores_NTT = torch.einsum("tnh,snh->nts", q_TNH, k_TNH) * q_TNH.shape[2] ** -0.5
    p_NTT = scores_NTT.masked_fill(~seen_TT, float("-inf")).softmax(-1, dtype=torch.float32)
    return torch.einsum("nts,snh->tnh", p_NTT.to(q_TNH.dtype), v_TNH)


@pytest.mark.parametrize("case", op.CASES)
def test_bf16_loses_no_more_than_eager_attention(case, device, rng):
    trees, (q, k, v, do), got, truth = _case(*case, device, torch.bfloat16, rng)
    seen_TT = _mask(trees, len(q), device)
    eager = _value_and_gradients(lambda q, k, v: _eager(q, k, v, seen_TT), (q, k, v), do)
    for ours, theirs, exact in zip(got, eager, truth, strict=True):
        assert ours.dtype == torch.bfloat16
        assert rms_error(ours, exact) <= 1.1 * rms_error(theirs, exact)


@pytest.mark.parametrize("case", op.CASES)
def test_bf16_gradients_lose_no_more_than_fused_attentions(case, device, rng):
    trees, (q, k, v, do), got, truth = _case(*case, device, torch.bfloat16, rng)
    seen_TT = _mask(trees, len(q), device)
    fused = _value_and_gradients(lambda q, k, v: _fused(q, k, v, seen_TT), (q, k, v), do)
    for ours, theirs, exact in list(zip(got, fused, truth, strict=True))[1:]:
        assert rms_error(ours, exact) <= 1.1 * rms_error(theirs, exact)


def test_a_branch_sees_its_prompt_and_itself_alone(device, rng):
    trees, T = _forest(((4, (3, 2)), (3, ())))
    q, k, v = _random(rng, device, torch.float32, (T, 2, 8), (T, 2, 8), (T, 2, 8))
    layout = op.PackedLayout.of(trees, device)
    before = op.packed_attention(q, k, v, layout)
    for row, seers in ((0, range(9)), (3, range(3, 9)), (4, (4, 5, 6)), (7, (7, 8)), (11, (11,))):
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[row] += 1
        changed_v[row] -= 1
        after = op.packed_attention(q, changed_k, changed_v, layout)
        assert (after != before).flatten(1).any(1).nonzero().flatten().tolist() == list(seers)


def test_trees_may_stand_in_any_order(device, rng):
    trees, T = _forest(((4, (3, 2)), (3, ()), (9, (1,))))
    q, k, v = _random(rng, device, torch.float32, (T, 2, 8), (T, 2, 8), (T, 2, 8))
    forth = op.packed_attention(q, k, v, op.PackedLayout.of(trees, device))
    back = op.packed_attention(q, k, v, op.PackedLayout.of(trees[::-1], device))
    torch.testing.assert_close(forth, back)


def test_gradients_are_the_same_bits_each_time(device, rng):
    """Eighty branches add to each prompt row: in an order left to chance their sums would differ."""
    trees, T = _forest([(8, (3,) * 80)] * 4)
    q, k, v, do = _random(rng, device, torch.float32, (T, 4, 16), (T, 2, 16), (T, 2, 16), (T, 4, 16))
    layout = op.PackedLayout.of(trees, device)
    first, *others = (
        _value_and_gradients(lambda q, k, v: op.packed_attention(q, k, v, layout), (q, k, v), do)
        for _ in range(4)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_layout_that_leaves_rows_out_is_refused():
    with pytest.raises(AssertionError, match="leave rows out"):
        op.PackedLayout.of([Tree(start=2, prompt_tokens=3, branch_tokens=())])


def test_blocks_are_bounded_in_padding_and_memory(rng):
    lengths = torch.randint(1, 700, (60,), generator=rng).tolist()
    trees, _ = _forest([(n, (n // 3, 5)) for n in lengths])
    runs = [(t.prompt_tokens, 0) for t in trees] + [
        (n, t.prompt_tokens) for t in trees for n in t.branch_tokens
    ]
    step = op.MAX_SPAN_QUERIES
    ends = [(min(end, n), end - step, p) for n, p in runs for end in range(step, n + step, step)]
    true = sum((end - first) * (p + end) for end, first, p in ends)
    masks = [block.mask_B11QS for block in op.PackedLayout.of(trees).blocks]
    assert sum(m.numel() for m in masks) <= op.MAX_PADDING * true
    assert max(m.numel() for m in masks) <= op.MAX_BLOCK_SCORES
    assert max(m.shape[-2] for m in masks) <= op.MAX_SPAN_QUERIES
    assert len(masks) < 60


def _cache(k_by_sequence, v_by_sequence, page_tokens, device):
    """Pages in a scrambled order holding the sequences, and a large number where nothing was written."""
    num_pages = [-(-len(k) // page_tokens) for k in k_by_sequence]
    order = torch.randperm(sum(num_pages) + 3, generator=torch.Generator().manual_seed(2)).to(device)
    shape = (len(order), page_tokens, *k_by_sequence[0].shape[1:])
    pages_k, pages_v = (torch.full(shape, 1e4, device=device, dtype=k_by_sequence[0].dtype) for _ in "kv")
    tables, used = [], 0
    for k, v, n in zip(k_by_sequence, v_by_sequence, num_pages, strict=True):
        table = order[used : used + n]
        used += n
        rows = (table[:, None] * page_tokens + torch.arange(page_tokens, device=device)).flatten()[: len(k)]
        pages_k.flatten(0, 1)[rows], pages_v.flatten(0, 1)[rows] = k, v
        tables.append(table)
    return pages_k, pages_v, tables


LENGTHS = (1, 4, 5, 33, 16)


def _sequences(device, dtype, rng):
    q, k, v = ([] for _ in range(3))
    for n in LENGTHS:
        for out, heads in ((q, 6), (k, 2), (v, 2)):
            out.append(torch.randn(n, heads, 16, generator=rng).to(device, dtype))
    plain = [[Tree(start=0, prompt_tokens=n, branch_tokens=())] for n in LENGTHS]
    return q, k, v, [op.reference(*x) for x in zip(q, k, v, plain, strict=True)]


@pytest.mark.parametrize(("dtype", "limit"), ((torch.float32, 1e-6), (torch.bfloat16, 3e-3)))
def test_decode_is_the_last_row_of_the_definition(dtype, limit, device, rng):
    q, k, v, truth = _sequences(device, dtype, rng)
    pages_k, pages_v, tables = _cache(k, v, 4, device)
    tables_BX = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
    last_BNH = torch.stack([x[-1] for x in q])
    got = op.paged_decode(last_BNH, pages_k, pages_v, tables_BX, torch.tensor(LENGTHS, device=device))
    assert got.dtype == dtype
    assert rms_error(got, torch.stack([t[-1] for t in truth])) < limit


CHUNKS = ((3, 10, 23), (0, 0, 1), (4, 0, 16), (3, 0, 10), (2, 4, 1))  # sequence, first position, rows
WHOLE = tuple((b, 0, n) for b, n in enumerate(LENGTHS))


def _prefill(chunks, dtype, device, rng):
    """(ours, the definition) of these chunks; only those that are not fresh read the pages."""
    q, k, v, truth = _sequences(device, dtype, rng)
    pages_k, pages_v, tables = _cache(k, v, 4, device)
    spans, rows = [], []
    for b, first, n in chunks:
        start = sum(r.stop - r.start for r in rows)
        spans.append(op.Span(start_row=start, num_rows=n, first_position=first, table=tables[b]))
        rows.append(slice(first, first + n))
    q, k, v, truth = (
        torch.cat([x[b][r] for (b, *_), r in zip(chunks, rows, strict=True)]) for x in (q, k, v, truth)
    )
    layout = op.PagedLayout.of(spans, 4, device)
    assert layout.is_fresh == all(first == 0 for _, first, _ in chunks)
    if not layout.is_fresh:
        k, v = (pages.flatten(0, 1)[layout.key_slots] for pages in (pages_k, pages_v))
    return op.span_attention(q, k, v, layout), truth


@pytest.mark.parametrize("chunks", (CHUNKS, WHOLE), ids=("chunks", "whole"))
@pytest.mark.parametrize(("dtype", "limit"), ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)))
def test_prefill_is_the_definition_in_chunks_and_whole(chunks, dtype, limit, device, rng):
    got, truth = _prefill(chunks, dtype, device, rng)
    assert got.dtype == dtype
    assert rms_error(got, truth) < limit


def test_spans_that_leave_rows_out_are_refused():
    span = op.Span(start_row=1, num_rows=2, first_position=0, table=torch.tensor([0]))
    with pytest.raises(AssertionError, match="leave rows out"):
        op.PagedLayout.of([span], 4, "cpu")
