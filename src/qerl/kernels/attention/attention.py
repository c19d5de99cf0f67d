"""Causal attention with grouped heads, over packed trees and over paged caches.

    o_n = softmax(q_n @ k^T / sqrt(H)) @ v      over the keys a query may see; k, v of head n * K // N

`AttentionOptions` change the scale, cap the scores, or let a query see its last keys only (a window). Every
call works on spans. A span is a run of neighboring query rows and the rows of its keys: the last query
sees all keys, the one before it all but the last, and so on.

    a packed tree     one span for the prompt; one per branch, whose keys are the prompt's rows and its own
    a prefill         rows of one sequence, whose keys are the cached positions up to each row's own
    a decode          one query, whose keys are all cached positions (needs lengths only, no layout)

Spans of similar size are padded into blocks. Letters: B spans of a block, Q queries, S keys, L = N / K * Q
the queries that share a K/V head, b = B * K, R rows of keys. Layout of the cache of one layer:

    pages_k, pages_v  [num_pages, page_tokens, K, H]; row = page * page_tokens + slot
    Padding reads row 0 or unused slots with weight zero: allocate pages with zeros, not uninitialized.

A prefill on a GPU in 16 bits uses FlashAttention (flash_attention.py), over the rows' own keys if these are
all of a sequence's keys, else over keys gathered from its pages (`PagedLayout`, computed once for all
layers). In all other cases scores, softmax and the sums over shared keys are fp32, and the normalized weights
are rounded to the operands' dtype for the second product. torch's fused attention is not used on the CPU:
forward and backward of 16 trees of 97 tokens (9 heads of 64, bf16, 2 cores) take it 15 ms per layer, this
module 7. In bf16 its value is 1.2 times more accurate and its gradients are less accurate; eager attention is
less accurate in both (`tests/kernels/attention/test_attention.py`).
"""

import dataclasses
import functools
import itertools

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.attention.flash_attention import SequenceEnds, flash_attention, is_for_flash
from qerl.kernels.pointwise.add_rows import add_rows
from qerl.kernels.pointwise.matmul_fp32 import product
from qerl.kernels.runtime.gpu_memory import sent
from qerl.types import Tree

CASES = (  # N, K, H, trees as (prompt, branches)
    (4, 4, 16, ((7, ()), (1, ()))),
    (6, 2, 32, ((5, (3, 0, 9)), (12, (1,)), (1, (1, 1, 1, 1)))),
    (9, 3, 64, ((24, (5, 8, 2, 13)), (31, (4, 4, 4, 4)), (300, ()))),
)
MAX_SPAN_QUERIES = 256  # a longer span is split, so that its early queries skip its late keys
MAX_BLOCK_SCORES = 1 << 20  # [B, Q, S] elements of one head; 4 bytes each, times N heads
MAX_PADDING = 1.5  # padded scores / true scores within a block


def reference(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, trees: list[Tree], options: AttentionOptions = PLAIN
) -> Tensor:
    """The definition in float64, one query at a time; differentiable."""
    group, rows = q_TNH.shape[1] // k_TKH.shape[1], []
    k_TNH, v_TNH = (x.double().repeat_interleave(group, 1) for x in (k_TKH, v_TKH))
    for tree in trees:
        for start, length, prefix in _runs(tree):
            for i in range(start, start + length):
                seen = [*prefix, *range(start, i + 1)][-(options.window or 0) :]
                scores_SN = torch.einsum("nh,snh->sn", q_TNH[i].double(), k_TNH[seen])
                scores_SN = scores_SN * options.scale_of(q_TNH.shape[2])
                if options.softcap is not None:
                    scores_SN = options.softcap * (scores_SN / options.softcap).tanh()
                if options.sinks_N is not None:
                    scores_SN = torch.cat((scores_SN, options.sinks_N.double()[None]))
                p_SN = scores_SN.softmax(0)[: len(seen)]
                rows.append(torch.einsum("sn,snh->nh", p_SN, v_TNH[seen]))
    return torch.stack(rows)


def _runs(tree: Tree) -> list[tuple[int, int, range]]:
    """Return (first row, rows, rows of the shared prefix) of the prompt and of each branch."""
    prompt, start = range(tree.start, tree.start + tree.prompt_tokens), tree.start + tree.prompt_tokens
    runs = [(tree.start, tree.prompt_tokens, range(0))]
    for length in tree.branch_tokens:
        runs.append((start, length, prompt))
        start += length
    return runs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Rows of one sequence whose keys are cached: row start_row + i is position first_position + i."""

    start_row: int
    num_rows: int
    first_position: int
    table: Tensor
    """The sequence's pages in order, long."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    slots: slice  # its B * Q entries among the slots of all blocks
    key_rows_BS: Tensor
    mask_B11QS: Tensor  # fp32: 0 where a query sees a key, -inf elsewhere


@dataclasses.dataclass(frozen=True, slots=True)
class PackedLayout:
    """Which row sees which, computed once per batch and used by every layer."""

    blocks: tuple[_Block, ...]
    slots_T: Tensor  # the slot of each query row
    num_slots: int

    @classmethod
    def of(
        cls, trees: list[Tree], device: torch.device | str = "cpu", window: int | None = None
    ) -> "PackedLayout":
        """Return the layout of trees that together cover the rows 0..T-1."""
        runs = [run for tree in trees for run in _runs(tree)]
        spans = [(s, n, torch.tensor([*prefix, *range(s, s + n)])) for s, n, prefix in runs]
        return _layout(spans, device, window)


def _layout(
    spans: list[tuple[int, int, Tensor]], device: torch.device | str, window: int | None = None
) -> PackedLayout:
    """Return the layout of spans (first query row, queries, key rows) that together cover the query rows.
    The rows of a span's keys are those of neighboring positions."""
    spans = sorted(_split(spans, window), key=lambda span: (span[1], len(span[2])))
    slots_T = torch.full((max(start + n for start, n, _ in spans),), -1)
    blocks, num_slots = [], 0
    for block in _similar(spans):
        Q, S = block[-1][1], max(len(keys) for _, _, keys in block)
        num_keys = torch.tensor([len(keys) for _, _, keys in block])
        hidden = torch.tensor([n - 1 for _, n, _ in block])[:, None] - torch.arange(Q)
        seen_BQ = num_keys[:, None] - hidden  # it grows past the span, so every padding query sees a key
        is_hidden_BQS = torch.arange(S) >= seen_BQ[..., None]
        if window is not None:
            # A span has at most n + window - 1 keys: no padding query's window begins past key Q - 1.
            is_hidden_BQS |= torch.arange(S) < seen_BQ[..., None] - window
        mask_BQS = torch.zeros(len(block), Q, S).masked_fill_(is_hidden_BQS, float("-inf"))
        key_rows_BS = pad_sequence([keys for _, _, keys in block], batch_first=True)
        for b, (start, n, _) in enumerate(block):
            slots_T[start : start + n] = torch.arange(num_slots + b * Q, num_slots + b * Q + n)
        slots = slice(num_slots, num_slots + len(block) * Q)
        blocks.append(_Block(slots, sent(key_rows_BS, device), sent(mask_BQS[:, None, None], device)))
        num_slots = slots.stop
    assert (slots_T >= 0).all(), "the spans leave rows out"
    return PackedLayout(tuple(blocks), sent(slots_T, device), num_slots)


def _split(spans: list[tuple[int, int, Tensor]], window: int | None) -> list[tuple[int, int, Tensor]]:
    """Split spans longer than MAX_SPAN_QUERIES; drop empty ones, and keys before every query's window."""
    pieces = []
    for start, num_queries, keys in spans:
        for first in range(0, num_queries, MAX_SPAN_QUERIES):
            n = min(MAX_SPAN_QUERIES, num_queries - first)
            stop = len(keys) - num_queries + first + n
            first_key = 0 if window is None else max(stop - n + 1 - window, 0)
            pieces.append((start + first, n, keys[first_key:stop]))
    return pieces


def _similar(spans: list[tuple[int, int, Tensor]]) -> list[list[tuple[int, int, Tensor]]]:
    """Cut sorted spans into runs that waste little when padded to their longest span."""
    blocks, true, S = [], 0, 0
    for span in spans:
        scores = span[1] * len(span[2])
        S = max(S, len(span[2]))
        padded = (len(blocks[-1]) + 1) * span[1] * S if blocks else 0
        if not blocks or padded > min(MAX_BLOCK_SCORES, MAX_PADDING * (true + scores)):
            blocks.append([])
            true, S = 0, len(span[2])
        blocks[-1].append(span)
        true += scores
    return blocks


@dataclasses.dataclass(frozen=True)
class PagedLayout:
    """Spans of a prefill that together are the rows 0..T-1, in this order.

    A key row is the key of one position of one span; the key rows of a span are neighbors.
    """

    is_fresh: bool
    """True if every span starts at position 0, so that the rows' own keys and values are all the keys."""
    key_slots: Tensor
    """The cache slot of each key row: page * page_tokens + offset in the page."""
    ends: SequenceEnds
    """Ends of the spans' rows and key rows."""

    @classmethod
    def of(cls, spans: list[Span], page_tokens: int, device: torch.device | str) -> "PagedLayout":
        spans = sorted(spans, key=lambda span: span.start_row)
        num_queries = [span.num_rows for span in spans]
        num_keys = [span.first_position + span.num_rows for span in spans]
        starts = itertools.accumulate(num_queries[:-1], initial=0)
        assert list(starts) == [span.start_row for span in spans], "the spans leave rows out"
        offset = torch.arange(page_tokens)
        slots = [
            (span.table.cpu()[:, None] * page_tokens + offset).flatten()[:n]
            for span, n in zip(spans, num_keys, strict=True)
        ]
        return cls(
            is_fresh=all(span.first_position == 0 for span in spans),
            key_slots=sent(torch.cat(slots), device),
            ends=SequenceEnds.of(num_queries, num_keys, device),
        )

    def windowed(self, window: int | None) -> PackedLayout:
        if window not in self._windowed:
            queries, keys = self.ends.queries.tolist(), self.ends.keys.tolist()
            spans = [
                (queries[i], queries[i + 1] - queries[i], torch.arange(keys[i], keys[i + 1]))
                for i in range(len(queries) - 1)
            ]
            self._windowed[window] = _layout(spans, self.key_slots.device, window)
        return self._windowed[window]

    @functools.cached_property
    def _windowed(self) -> dict[int | None, PackedLayout]:
        return {}


def packed_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: PackedLayout, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return o_TNH, differentiable in q, k and v. The backward pass recomputes the scores. The layout is that
    of the options' window."""
    assert len(q_TNH) == len(k_TKH) == len(layout.slots_T) and k_TKH.shape == v_TKH.shape
    return _PackedAttention.apply(q_TNH, k_TKH, v_TKH, layout, options)


def span_attention(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: PagedLayout, options: AttentionOptions = PLAIN
) -> Tensor:
    """Return o_TNH over key rows that were read from the cache; has no gradient."""
    assert len(k_RKH) == len(v_RKH) == len(layout.key_slots) and k_RKH.dtype == q_TNH.dtype
    if q_TNH.is_cuda and q_TNH.dtype != torch.float32 and is_for_flash(q_TNH.shape[2], options):
        return flash_attention(q_TNH, k_RKH, v_RKH, layout.ends, options)
    return _attend(q_TNH, k_RKH, v_RKH, layout.windowed(options.window), options)


def paged_decode(
    q_BNH: Tensor,
    pages_k: Tensor,
    pages_v: Tensor,
    tables_BX: Tensor,
    lengths_B: Tensor,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Return o_BNH of one token per sequence over lengths_B >= 1 positions; tables_BX is padded with 0."""
    (B, N, H), K = q_BNH.shape, pages_k.shape[2]
    k_bSH, v_bSH = (
        _heads_first(x.index_select(0, tables_BX.flatten()).flatten(0, 1), B, K) for x in (pages_k, pages_v)
    )
    S = k_bSH.shape[1]
    beyond_BS = torch.arange(S, device=q_BNH.device) >= lengths_B[:, None]
    if options.window is not None:
        beyond_BS |= torch.arange(S, device=q_BNH.device) < lengths_B[:, None] - options.window
    mask_BS = torch.zeros_like(beyond_BS, dtype=torch.float32).masked_fill_(beyond_BS, float("-inf"))
    mask_B111S = mask_BS[:, None, None, None]
    p_bLS, _ = _weights(q_BNH.reshape(B * K, N // K, H), k_bSH, mask_B111S, options)
    return torch.bmm(p_bLS.to(q_BNH.dtype), v_bSH).view(B, N, H)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, layout, options):
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH)
        ctx.layout, ctx.options = layout, options
        return _attend(q_TNH, k_TKH, v_TKH, layout, options)

    @staticmethod
    def backward(ctx, do_TNH):  # type: ignore[override]
        q_TNH, k_TKH, v_TKH = ctx.saved_tensors
        return *_attend_backward(do_TNH, q_TNH, k_TKH, v_TKH, ctx.layout, ctx.options), None, None


def _attend(
    q_TNH: Tensor, k_RKH: Tensor, v_RKH: Tensor, layout: PackedLayout, options: AttentionOptions
) -> Tensor:
    q_slots = _to_slots(q_TNH, layout)
    o_slots = torch.empty_like(q_slots)
    for block in layout.blocks:
        B, K = len(block.key_rows_BS), k_RKH.shape[1]
        k_bSH, v_bSH = (_heads_first(_rows(x, block), B, K) for x in (k_RKH, v_RKH))
        p_bLS, _ = _weights(_heads_first(q_slots[block.slots], B, K), k_bSH, block.mask_B11QS, options)
        o_slots[block.slots] = _heads_last(torch.bmm(p_bLS.to(q_TNH.dtype), v_bSH), B, q_TNH.shape[1])
    return o_slots.index_select(0, layout.slots_T)


def _attend_backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: PackedLayout,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """With dp = do @ v^T:  ds = p * (dp - sum(p * dp)),  dq = ds @ k,  dk = ds^T @ q,  dv = p^T @ do."""
    dtype, (_, K, H) = q_TNH.dtype, k_TKH.shape
    q_slots, do_slots = _to_slots(q_TNH, layout), _to_slots(do_TNH, layout)
    dq_slots = torch.empty_like(q_slots)
    dk_TKH, dv_TKH = (torch.zeros_like(k_TKH, dtype=torch.float32) for _ in range(2))
    for block in layout.blocks:
        B, rows = len(block.key_rows_BS), block.key_rows_BS.flatten()
        q_bLH, do_bLH = (_heads_first(x[block.slots], B, K) for x in (q_slots, do_slots))
        k_bSH, v_bSH = (_heads_first(_rows(x, block), B, K) for x in (k_TKH, v_TKH))
        p_bLS, slope_bLS = _weights(q_bLH, k_bSH, block.mask_B11QS, options)
        dv_bSH = torch.bmm(p_bLS.to(dtype).transpose(1, 2), do_bLH)
        pdp_bLS = product(do_bLH, v_bSH.transpose(1, 2)).mul_(p_bLS)
        ds_bLS = pdp_bLS.sub_(p_bLS.mul_(pdp_bLS.sum(-1, keepdim=True))).mul_(options.scale_of(H))
        ds_bLS = (ds_bLS if slope_bLS is None else ds_bLS.mul_(slope_bLS)).to(dtype)
        dq_slots[block.slots] = _heads_last(torch.bmm(ds_bLS, k_bSH), B, q_TNH.shape[1])
        dk_bSH = torch.bmm(ds_bLS.transpose(1, 2), q_bLH)
        add_rows(dk_TKH, rows, _heads_last(dk_bSH, B, K).float())
        add_rows(dv_TKH, rows, _heads_last(dv_bSH, B, K).float())
    return dq_slots.index_select(0, layout.slots_T), dk_TKH.to(dtype), dv_TKH.to(dtype)


def _weights(
    q_bLH: Tensor, k_bSH: Tensor, mask_B11QS: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """Return p_bLS in fp32, and the slope of the soft cap if there is one."""
    b, L, H = q_bLH.shape
    (B, _, _, Q, S), K = mask_B11QS.shape, b // len(mask_B11QS)
    scores, slope = options.scaled(product(q_bLH, k_bSH.transpose(1, 2)).view(B, K, L // Q, Q, S), H)
    p_bLS = options.softmax(scores.add_(mask_B11QS)).reshape(b, L, S)
    return p_bLS, None if slope is None else slope.view(b, L, S)


def _to_slots(x_TNH: Tensor, layout: PackedLayout) -> Tensor:
    """Return [slots, N, H], zero where a block is padded."""
    return x_TNH.new_zeros(layout.num_slots, *x_TNH.shape[1:]).index_copy_(0, layout.slots_T, x_TNH)


def _rows(x_RKH: Tensor, block: _Block) -> Tensor:
    """Return the block's keys or values, [B * S, K, H]."""
    return x_RKH.index_select(0, block.key_rows_BS.flatten())


def _heads_first(x_rows: Tensor, B: int, K: int) -> Tensor:
    """Reshape [B * rows, heads, H], where heads is K or N, to one matrix per span and K/V head."""
    num_rows, heads, H = len(x_rows) // B, *x_rows.shape[1:]
    grouped = x_rows.view(B, num_rows, K, heads // K, H).permute(0, 2, 3, 1, 4)
    return grouped.reshape(B * K, heads // K * num_rows, H)


def _heads_last(x_bLH: Tensor, B: int, heads: int) -> Tensor:
    """Return [B * rows, heads, H]; the inverse of _heads_first."""
    K, H = len(x_bLH) // B, x_bLH.shape[-1]
    return x_bLH.view(B, K, heads // K, -1, H).permute(0, 3, 1, 2, 4).reshape(-1, heads, H)
