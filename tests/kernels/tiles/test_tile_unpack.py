import pytest
import torch

from qerl.formats import NVFP4
from qerl.kernels.tiles import nvfp4_decode
from qerl.kernels.tiles import tile_unpack as op
from qerl.kernels.tiles.tile_unpack import UnpackRows


def _weight(N, K, rng, device):
    codes = torch.randint(0, 256, (N, K // 2), generator=rng, dtype=torch.uint8)
    scales = torch.randint(1, 127, (N, K // 16), generator=rng, dtype=torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    return NVFP4(codes.to(device), scales.to(device), torch.ones(1, device=device))


def _tiles(weight, rows):
    codes, scales = weight.codes, weight.scales
    if rows is not UnpackRows.ALL:
        order = nvfp4_decode.swiglu_order(len(codes) // 2, codes.device)
        codes, scales = codes[order], scales.view(torch.uint8)[order].view(scales.dtype)
    return nvfp4_decode.pack(codes, scales)


def _rows(weight, rows):
    half = weight.shape[0] // 2
    return {UnpackRows.GATE: slice(half), UnpackRows.UP: slice(half, None)}.get(rows, slice(None))


@pytest.mark.parametrize("rows", UnpackRows)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize(("N", "K"), op.CASES)
def test_the_operand_is_the_formats_bit_for_bit(N, K, dtype, rows, device, rng):
    weight = _weight(N, K, rng, device)
    truth, tiles = weight.operand(dtype)[_rows(weight, rows)], _tiles(weight, rows)
    got = op.unpack(tiles, rows, dtype)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(got.view(bits), truth.contiguous().view(bits))  # the sign of a zero too
    assert torch.equal(op.reference(tiles, rows), truth.double())


@pytest.mark.parametrize("rows", UnpackRows)
def test_rows_of_a_wider_tensor_are_written_and_nothing_else(rows, device, rng):
    weight = _weight(192, 576, rng, device)
    truth, tiles = weight.operand(torch.bfloat16)[_rows(weight, rows)], _tiles(weight, rows)
    wide = torch.full((len(truth) + 2, 576 + 32), 7.0, dtype=torch.bfloat16, device=device)
    got = op.unpack(tiles, rows, torch.bfloat16, out=wide[1:-1, :576])
    assert torch.equal(got, truth) and torch.equal(wide[1:-1, :576], truth)
    wide[1:-1, :576] = 7
    assert (wide == 7).all()


@pytest.mark.parametrize("rows", UnpackRows)
def test_the_plain_form_comes_back(rows, device, rng):
    weight = _weight(128, 192, rng, device)
    codes, scales = op.plain(_tiles(weight, rows), rows)
    assert torch.equal(codes, weight.codes[_rows(weight, rows)])
    assert torch.equal(scales.view(torch.uint8), weight.scales.view(torch.uint8)[_rows(weight, rows)])


def test_a_block_of_scale_zero_is_zero(device, rng):
    weight = _weight(64, 128, rng, device)
    weight.scales.view(torch.uint8)[:, 3] = 0
    got = op.unpack(_tiles(weight, UnpackRows.ALL), UnpackRows.ALL, torch.bfloat16)
    assert torch.equal(got, weight.operand(torch.bfloat16)) and not got[:, 48:64].any()
