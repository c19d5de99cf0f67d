"""Rows of a packed weight: the same values as those of the whole, or nothing."""

import pytest
import torch

from qerl.formats import FORMATS, FP8
from qerl.models.checkpoint.layouts.rows import cut_rows

N, K = 384, 256
CUTS = slice(0, 128), slice(128, 256), slice(128, 384), slice(256, 384)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "fp8-flow"])
def test_aligned_rows_decode_to_those_of_the_whole(rng, format):
    weight = FORMATS[format].encode(torch.randn(N, K, generator=rng, device=rng.device))
    for rows in CUTS:
        cut = cut_rows(weight, rows)
        assert type(cut) is type(weight) and torch.equal(cut.decode(), weight.decode()[rows])


@pytest.mark.parametrize("format", ["fp8", "nf4"])
def test_rows_that_share_a_block_with_others_are_no_weight_of_their_own(rng, format):
    weight = FORMATS[format].encode(torch.randn(N, K, generator=rng, device=rng.device))
    assert cut_rows(weight, slice(1, 200)) is None


def test_rows_of_a_weight_with_one_scale_can_be_cut_anywhere(rng):
    codes = FP8.encode(torch.randn(N, K, generator=rng, device=rng.device)).codes
    weight = FP8(codes, torch.full((3, 2), 0.25, device=codes.device))
    assert torch.equal(cut_rows(weight, slice(5, 301)).decode(), weight.decode()[5:301])
