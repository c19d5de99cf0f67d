"""o = softmax(q k^T / sqrt(H)) v for one token per row over a paged cache, bitwise independent of the batch.

    per CHUNK of positions: s = q k^T / sqrt(H), -inf beyond the row's own; m' = max(m, max s)
    p = exp(s - m'), sum = sum * exp(m - m') + sum p, o = o * exp(m - m') + p v; m = m'     finally o / sum

A chunk past a row's length adds nothing and scales by one, so a row's bits depend neither on the table's
width nor on the other rows' lengths. These are a dimension of a product in `attention.paged_decode`, which
is faster. The bits do not depend on the row's index either if 16 divides the number of rows (tests/kernels/
test_chunked_attention.py). fp32 inside; p is rounded to the operands' dtype for its product.
"""

import torch
from torch import Tensor

from qerl.kernels.attention.attention_options import PLAIN, AttentionOptions
from qerl.kernels.pointwise.matmul_fp32 import product

CASES = ((6, 2, 16, 5, 40), (9, 3, 64, 16, 24), (4, 4, 32, 64, 3))  # N, K, H, page_tokens, pages of a table
CHUNK = 128
_MIN_SCORE = -1e30  # finite, so that a chunk of which a row sees no position changes nothing


def chunked_decode(
    q_BNH: Tensor,
    pages_k: Tensor,
    pages_v: Tensor,
    tables_BX: Tensor,
    lengths_B: Tensor,
    options: AttentionOptions = PLAIN,
) -> Tensor:
    """Return o_BNH over lengths_B >= 1 positions per row; tables_BX is padded with initialized pages."""
    (B, N, H), (page_tokens, K), X = q_BNH.shape, pages_k.shape[1:3], tables_BX.shape[1]
    q_bLH = q_BNH.reshape(B * K, N // K, H)
    largest_bL1 = torch.full((B * K, N // K, 1), _MIN_SCORE, device=q_BNH.device)
    sum_bL1, o_bLH = torch.zeros_like(largest_bL1), torch.zeros(q_bLH.shape, device=q_BNH.device)
    if options.sinks_N is not None:
        largest_bL1 = options.sinks_N.view(1, K, N // K, 1).expand(B, -1, -1, -1).flatten(0, 1).clone()
        sum_bL1.fill_(1)
    for start in range(0, X * page_tokens, CHUNK):
        positions_C = torch.arange(start, start + CHUNK, device=q_BNH.device)
        pages_BC = tables_BX[:, (positions_C // page_tokens).clamp(max=X - 1)]
        rows_BC = pages_BC * page_tokens + positions_C % page_tokens
        k_bCH, v_bCH = (_heads_first(pages, rows_BC) for pages in (pages_k, pages_v))
        is_hidden_BC = positions_C >= lengths_B[:, None]
        if options.window is not None:
            is_hidden_BC |= positions_C < lengths_B[:, None] - options.window
        scores_bLC, _ = options.scaled(product(q_bLH, k_bCH.transpose(1, 2)), H)
        scores_bLC.masked_fill_(is_hidden_BC.repeat_interleave(K, 0)[:, None], -torch.inf)
        before_bL1 = largest_bL1
        largest_bL1 = torch.maximum(before_bL1, scores_bLC.amax(-1, keepdim=True))
        p_bLC, rescale_bL1 = scores_bLC.sub_(largest_bL1).exp_(), (before_bL1 - largest_bL1).exp_()
        sum_bL1 = sum_bL1 * rescale_bL1 + p_bLC.sum(-1, keepdim=True)
        o_bLH = o_bLH * rescale_bL1 + product(p_bLC.to(q_BNH.dtype), v_bCH)
    return (o_bLH / sum_bL1).to(q_BNH.dtype).view(B, N, H)


def _heads_first(pages: Tensor, rows_BC: Tensor) -> Tensor:
    """Return the keys or values of these rows, [B * K, C, H]."""
    x_BCKH = pages.flatten(0, 1)[rows_BC]
    return x_BCKH.transpose(1, 2).flatten(0, 1).contiguous()
