"""What is said of an allocator's pieces."""

import pytest

from qerl.kernels.runtime.gpu_memory import largest_doubling, pieces_of


def segment(device, *blocks):
    return {"device": device, "blocks": [{"state": state, "size": size} for state, size in blocks]}


def test_unused_pieces_are_counted_on_one_device_and_the_largest_is_named():
    segments = [
        segment(0, ("active_allocated", 6 * 10**8), ("inactive", 4 * 10**8)),
        segment(0, ("inactive", 10**7), ("active_pending_free", 10**9)),
        segment(1, ("inactive", 10**10)),
    ]
    assert pieces_of(segments, 0) == (
        "1.60 GB in use, 0.41 GB unused in 2 pieces of 2 segments, the largest of 0.400 GB"
    )
    assert pieces_of([], 0).startswith("0.00 GB in use, 0.00 GB unused in 0 pieces")


@pytest.mark.parametrize(
    ("limit", "tokens"), [(0.0, 8), (8, 8), (15.9, 8), (16, 16), (31.0, 16), (32.5, 32), (1e12, 2**39)]
)
def test_tokens_are_doubled_as_often_as_a_limit_allows(limit, tokens):
    assert largest_doubling(8, limit) == tokens
