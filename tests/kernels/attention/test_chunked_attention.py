import pytest
import torch

from conftest import rms_error
from qerl.kernels.attention import chunked_attention as op
from qerl.kernels.attention.attention import paged_decode


def case(B, N, K, H, page_tokens, X, dtype, rng):
    q = torch.randn(B, N, H, generator=rng).to(dtype)
    k, v = (torch.randn(B * X, page_tokens, K, H, generator=rng).to(dtype) for _ in range(2))
    tables = torch.randperm(B * X, generator=rng).view(B, X)
    lengths = torch.randint(1, X * page_tokens + 1, (B,), generator=rng)
    lengths[:3] = torch.tensor([1, X * page_tokens, min(op.CHUNK, X * page_tokens)])
    return q, k, v, tables, lengths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "K", "H", "page_tokens", "X"), op.CASES)
def test_no_less_exact_than_all_positions_at_once(N, K, H, page_tokens, X, dtype, rng):
    q, k, v, tables, lengths = case(16, N, K, H, page_tokens, X, dtype, rng)
    truth = torch.stack([_row(q[b], k, v, tables[b], int(lengths[b])) for b in range(16)])
    lost = rms_error(paged_decode(q, k, v, tables, lengths), truth)
    assert rms_error(op.chunked_decode(q, k, v, tables, lengths), truth) <= 1.1 * lost


def _row(q_NH, k, v, table_X, length):
    """In float64, head by head."""
    N, H = q_NH.shape
    k_SKH, v_SKH = (pages[table_X].flatten(0, 1)[:length].double() for pages in (k, v))
    group = N // k.shape[2]
    k_SNH, v_SNH = (x.repeat_interleave(group, 1) for x in (k_SKH, v_SKH))
    weights_NS = (torch.einsum("nh,snh->ns", q_NH.double(), k_SNH) / H**0.5).softmax(-1)
    return torch.einsum("ns,snh->nh", weights_NS, v_SNH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("N", "K", "H", "page_tokens", "X"), op.CASES)
def test_place_neighbours_and_the_tables_width_change_no_bit(N, K, H, page_tokens, X, dtype, rng):
    q, k, v, tables, lengths = case(32, N, K, H, page_tokens, X, dtype, rng)
    o = op.chunked_decode(q, k, v, tables, lengths)
    order = torch.randperm(32, generator=rng)
    wider = torch.nn.functional.pad(tables, (0, 40))
    assert torch.equal(op.chunked_decode(q[order], k, v, wider[order], lengths[order]), o[order])
    shorter = lengths.clone()
    shorter[5:] = 1
    assert torch.equal(op.chunked_decode(q, k, v, tables, shorter)[:5], o[:5])
