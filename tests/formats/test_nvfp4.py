"""NVFP4: compressed-tensors' bits, and arithmetic that is exact where it is said to be."""

import pytest
import torch

from formats.layers import LAYERS, gaussian
from formats.oracles import compressed_nvfp4
from qerl.formats import NVFP4

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 0 to 448, the last code being NaN


@pytest.mark.parametrize("layer", LAYERS)
def test_encoding_gives_the_bits_of_compressed_tensors(layer):
    codes, scales, global_scale = compressed_nvfp4(LAYERS[layer])
    ours = NVFP4.encode(LAYERS[layer])
    assert torch.equal(ours.global_scale, global_scale)
    assert torch.equal(ours.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(ours.codes, codes)


def test_decoding_is_code_times_scale_over_global_scale():
    weight = NVFP4.encode(LAYERS["down_proj"])
    q = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).flatten(1).long()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    scales = weight.scales.double().repeat_interleave(16, dim=1)
    truth = values[q] * scales / weight.global_scale.double()
    error = (weight.decode().double() - truth).abs()
    assert (error <= truth.abs() * 2**-23).all()  # 1/g and the product round once each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_times_every_scale_is_exact_in_16_bits(dtype):
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    weight = NVFP4(codes | codes << 4, E4M3.repeat_interleave(2).view(127, 2), torch.ones(1))
    truth = weight.operand(torch.float32).double()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    assert torch.equal(truth, E4M3.double()[:, None] * values.repeat_interleave(2))
    assert torch.equal(weight.operand(dtype).double(), truth)


def test_the_largest_weight_gets_the_largest_code_and_scale():
    weight_NK = gaussian(64, 256)
    weight_NK[3, 40] = -7.0
    weight = NVFP4.encode(weight_NK)
    assert weight.scales[3, 2].item() == 448
    assert weight.operand(torch.float32)[3, 40].item() == -6 * 448
    assert weight.decode()[3, 40].item() == pytest.approx(-7.0, rel=2**-22)


def test_a_layer_of_zeros_decodes_to_zeros():
    weight = NVFP4.encode(torch.zeros(32, 64))
    assert weight.global_scale.item() == 1
    assert torch.equal(weight.decode(), torch.zeros(32, 64))


def test_a_block_that_the_scale_cannot_reach_decodes_to_zeros():
    weight_NK = gaussian(16, 64)
    weight_NK[5, 16:32] *= 1e-12
    weight = NVFP4.encode(weight_NK)
    assert weight.scales[5, 1].item() == 0.125
    assert not weight.decode()[5, 16:32].any()
    assert weight.decode()[5, :16].any()


def test_a_layer_whose_global_scale_would_overflow_decodes_to_zeros():
    assert not NVFP4.encode(gaussian(16, 64) * 1e-37).decode().any()


def test_encoding_what_was_decoded_gives_the_same_weight():
    once = NVFP4.encode(gaussian(192, 576))
    assert once.scales.float().min() >= 2**-6  # a subnormal scale can lose the block's largest weight
    again = NVFP4.encode(once.decode())
    assert torch.equal(again.operand(torch.float32), once.operand(torch.float32))
    assert again.alpha.item() == pytest.approx(once.alpha.item(), rel=2**-22)


def test_tensors_of_another_shape_are_refused():
    weight = NVFP4.encode(gaussian(16, 64))
    with pytest.raises(AssertionError):
        NVFP4(weight.codes, weight.scales[:, :2], weight.global_scale)
    with pytest.raises(AssertionError):
        NVFP4(weight.codes, weight.scales, weight.global_scale[0])
