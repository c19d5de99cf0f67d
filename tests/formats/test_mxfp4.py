"""MXFP4: compressed-tensors' bits, powers of two from end to end."""

import pytest
import torch

from formats.layers import LAYERS, gaussian
from formats.oracles import compressed_mxfp4
from qerl.formats import MXFP4


@pytest.mark.parametrize("layer", LAYERS)
def test_encoding_gives_the_bits_of_compressed_tensors(layer):
    codes, scales = compressed_mxfp4(LAYERS[layer])
    ours = MXFP4.encode(LAYERS[layer])
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.codes, codes)


def test_every_code_times_every_scale_is_exact_in_bfloat16():
    codes = torch.arange(16, dtype=torch.uint8).repeat(253, 1)
    scales = torch.arange(253, dtype=torch.uint8)  # up to 2^125, beyond which 6 overflows
    weight = MXFP4(
        codes | codes << 4,
        scales[:, None],
    )
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    truth = 2.0 ** (scales.double()[:, None] - 127) * values.repeat_interleave(2)
    assert torch.equal(weight.operand(torch.bfloat16).double(), truth)
    assert torch.equal(weight.decode().double(), truth)


@pytest.mark.parametrize(
    "largest, exponent", [(1.0, -2), (1.7499, -2), (1.75, -1), (1.99, -1), (4.0, 0), (7.0, 1)]
)
def test_the_scale_rounds_up_from_seven_eighths_of_a_binade(largest, exponent):
    weight_NK = torch.zeros(1, 32)
    weight_NK[0, 7] = -largest
    assert MXFP4.encode(weight_NK).scales.item() == exponent + 127


@pytest.mark.parametrize("largest", [3.3e38, 3.0e38, 2.0e38])
def test_weights_near_the_end_of_float32_stay_finite(largest):
    weight_NK = torch.full((1, 32), largest)
    decoded = MXFP4.encode(weight_NK).decode()
    assert decoded.isfinite().all()
    assert ((decoded - weight_NK).abs() <= weight_NK / 4).all()


def test_subnormal_weights_take_the_smallest_scale():
    weight = MXFP4.encode(torch.full((1, 32), 2.0**-128))
    assert weight.scales.item() == 0
    assert torch.equal(weight.decode(), torch.full((1, 32), 2.0**-128))


@pytest.mark.parametrize("layer", LAYERS)
def test_encoding_what_was_decoded_gives_the_same_weight(layer):
    once = MXFP4.encode(LAYERS[layer]).decode()
    assert torch.equal(MXFP4.encode(once).decode(), once)


def test_a_block_depends_on_its_own_weights_alone():
    weight_NK = gaussian(8, 96)
    changed = weight_NK.clone()
    changed[2, 32:64] *= 1000
    same = MXFP4.encode(weight_NK).decode() == MXFP4.encode(changed).decode()
    assert same[2, :32].all() and same[2, 64:].all() and not same[2, 32:64].all()
