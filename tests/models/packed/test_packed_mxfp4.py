"""MXFP4 in the tiles of NVFP4: the same numbers, by way of a factor for each row."""

import pytest
import torch

from models.packed.test_packed_linear import decoder_of, outputs
from qerl.formats import MXFP4
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.linear import QuantLinear
from qerl.models.packed.packed_linear import PackedMXFP4, can_tile, tile_group, tile_linears


def weight(rng, N=128, K=192, binades=6):
    spread = torch.exp2(torch.randint(-binades, 1, (N, K // 32), generator=rng).float())
    return torch.randn(N, K, generator=rng) * spread.repeat_interleave(32, dim=1) * 0.02


def test_values_codes_and_scales_come_back(rng):
    plain = MXFP4.encode(weight(rng))
    tiled = PackedMXFP4(tile_group([plain], UnpackRows.ALL), 0)
    assert torch.equal(tiled.decode(), plain.decode()) and tiled.shape == plain.shape
    back = tiled.plain()
    assert torch.equal(back.codes, plain.codes) and torch.equal(back.scales, plain.scales)


def test_a_block_of_zeros_comes_back_with_the_smallest_scale(rng):
    plain = MXFP4.encode(weight(rng).index_fill(1, torch.arange(32, 64), 0.0))
    plain.scales[:, 1] = 130
    back = PackedMXFP4(tile_group([plain], UnpackRows.ALL), 0).plain()
    assert torch.equal(back.decode(), plain.decode())
    assert not back.scales[:, 1].any() and torch.equal(back.scales[:, 2:], plain.scales[:, 2:])


def test_a_row_of_zeros_is_zeros(rng):
    plain = MXFP4.encode(weight(rng).index_fill(0, torch.tensor([5, 64]), 0.0))
    tiled = PackedMXFP4(tile_group([plain], UnpackRows.ALL), 0)
    assert torch.equal(tiled.decode(), plain.decode()) and tiled.alpha.isfinite().all()


@pytest.mark.parametrize(("least", "fits"), [(-17, True), (-18, False)])
def test_a_row_with_more_binades_than_e4m3_stays_as_it_is(rng, least, fits):
    plain = MXFP4.encode(weight(rng, binades=0))
    plain.codes.fill_(0x22)
    plain.scales.fill_(120)
    plain.scales[3, 2] = 120 + least
    assert can_tile([plain], UnpackRows.ALL) == fits
    linear = QuantLinear(192, 128, has_bias=False, compute=torch.float32, device=torch.device("cpu"))
    linear.load_weight(plain)
    assert tile_linears([linear], UnpackRows.ALL) == fits
    assert isinstance(linear.weight, PackedMXFP4 if fits else MXFP4)
    assert torch.equal(linear.weight.decode(), plain.decode())


def test_scales_near_the_ends_of_their_range_stay_as_they_are(rng):
    for byte in (8, 250):
        plain = MXFP4.encode(weight(rng))
        plain.scales.fill_(byte)
        assert not can_tile([plain], UnpackRows.ALL)


def tiled_outputs(compute):
    """Return the outputs of a decoder before and after tiling."""
    decoder = decoder_of(compute, MXFP4)
    before = outputs(decoder)
    decoder.zero_grad()
    for each in decoder.layers:
        each.tile()
    assert all(isinstance(linear.weight, PackedMXFP4) for _, linear in decoder.linears())
    return before, outputs(decoder)


@pytest.mark.parametrize("compute", (torch.float32, torch.bfloat16))
def test_a_tiled_decoder_computes_the_same_bits(compute):
    for before, after in zip(*tiled_outputs(compute), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("rows", (UnpackRows.ALL, UnpackRows.GATE_UP))
def test_the_operand_includes_the_rows_factors(rows, rng, device):
    plain = [MXFP4.encode(weight(rng).to(device)) for _ in range(2)]
    group = tile_group(plain, rows)
    assert torch.equal(group.operand(torch.bfloat16), torch.cat([w.operand(torch.bfloat16) for w in plain]))
    for index, own in enumerate(plain):
        tiled = PackedMXFP4(group, index)
        assert torch.equal(tiled.operand(torch.bfloat16), own.operand(torch.bfloat16)) and tiled.alpha == 1
