"""NF4, FP8 and INT8 in tiles: a decoder computes the same bits; weights that do not fit stay as they are."""

import pytest
import torch

from models.packed.test_packed_linear import decoder_of, outputs
from qerl.formats import FP8, INT8, NF4, FP8Flow
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.packed.packed_linear import PackedFP8, PackedINT8, PackedNF4, can_tile, tile_group

KINDS = ((NF4, PackedNF4), (FP8, PackedFP8), (INT8, PackedINT8))
by_name = pytest.mark.parametrize(("plain", "tiled"), KINDS, ids=[kind.name for kind, _ in KINDS])


@by_name
@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16))
def test_a_tiled_decoder_computes_the_same_bits(plain, tiled, compute):
    decoder = decoder_of(compute, plain)
    want = outputs(decoder)
    decoder.zero_grad()
    for each in decoder.layers:
        each.tile()
    assert all(isinstance(linear.weight, tiled) for _, linear in decoder.linears())
    for before, after in zip(want, outputs(decoder), strict=True):
        assert torch.equal(before, after)


@by_name
def test_a_linears_bytes_and_its_copy_on_a_device_are_its_share_of_the_group(plain, tiled, rng):
    weights = [plain.encode(torch.randn(64, 128, generator=rng)) for _ in range(2)]
    for rows in (UnpackRows.ALL, UnpackRows.GATE_UP):
        group = tile_group(weights, rows)
        parts = [tiled(group, index) for index in (0, 1)]
        one = {id(t): t.nbytes for part in parts for t in part.tensors().values()}
        assert sum(part.num_bytes for part in parts) == sum(one.values())
        for part, weight in zip(parts, weights, strict=True):
            moved = part.to("cpu")
            assert torch.equal(moved.decode(), weight.decode()) and torch.equal(
                part.decode(), weight.decode()
            )
            assert torch.equal(moved.group.factors_N, weight.alpha.expand(64))


def test_scales_that_would_overflow_and_codes_that_are_no_numbers_are_not_tiled(rng):
    weight = FP8.encode(torch.randn(64, 128, generator=rng))
    assert can_tile([weight], UnpackRows.ALL)
    assert not can_tile([FP8(weight.codes, weight.scales.new_full((1, 1), 128.0))], UnpackRows.ALL)
    codes = weight.codes.view(torch.uint8).clone()
    codes[3, 5] = 0xFF
    assert not can_tile([FP8(codes.view(torch.float8_e4m3fn), weight.scales)], UnpackRows.ALL)


def test_formats_of_other_products_or_of_two_kinds_are_not_tiled(rng):
    weight = torch.randn(64, 128, generator=rng)
    assert not can_tile([FP8Flow.encode(weight)], UnpackRows.ALL)
    assert not can_tile([NF4.encode(weight), INT8.encode(weight)], UnpackRows.ALL)
    assert not can_tile([], UnpackRows.ALL)
