"""FP8 in blocks of 128 x 128, the ragged ones at the edges included."""

import pytest
import torch

from conftest import rms_error
from formats.layers import LAYERS, gaussian
from qerl.formats import FP8

FINITE = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)


def block_by_block(weight_NK):
    """Codes and scales by the formula, one block at a time."""
    codes = torch.zeros(weight_NK.shape)
    scales = torch.zeros(-(-weight_NK.shape[0] // 128), -(-weight_NK.shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight_NK[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            scales[i, j] = block.abs().max() / 448 if block.any() else 1.0
            codes[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] = block / scales[i, j]
    return codes.clamp(-448, 448).to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize("shape", [(576, 1536), (128, 128), (129, 127), (1, 1), (300, 576), (64, 200)])
def test_a_weight_is_encoded_block_by_block(shape):
    weight_NK = gaussian(*shape)
    codes, scales = block_by_block(weight_NK)
    ours = FP8.encode(weight_NK)
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.codes.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_with_outliers_and_zeros_are_encoded_block_by_block(layer):
    codes, scales = block_by_block(LAYERS[layer])
    ours = FP8.encode(LAYERS[layer])
    assert torch.equal(ours.scales, scales)
    assert torch.equal(ours.codes.view(torch.uint8), codes.view(torch.uint8))


def test_every_code_decodes_to_its_value_times_its_blocks_scale():
    codes = FINITE.repeat(130, 1)[:, :200]
    scales = torch.tensor([[0.5, 3.0], [7.0, 0.1]])
    weight = FP8(codes.view(torch.float8_e4m3fn), scales)
    values = codes.view(torch.float8_e4m3fn).float()
    expected = values.clone()
    expected[:128, :128] *= 0.5
    expected[:128, 128:] *= 3.0
    expected[128:, :128] *= 7.0
    expected[128:, 128:] *= 0.1
    assert torch.equal(weight.decode(), expected)


def test_ties_go_to_the_even_code():
    values = FINITE[FINITE < 127].view(torch.float8_e4m3fn).float()
    ties = (values[:-1] + values[1:]) / 2
    weight_NK = torch.cat([torch.tensor([448.0]), ties]) * torch.tensor([[1.0], [-1.0]])
    codes = FP8.encode(weight_NK).codes.view(torch.uint8)[:, 1:].tolist()
    even = [code + code % 2 for code in range(126)]
    assert codes == [even, [code + 128 for code in even]]


def test_weights_too_small_for_their_own_scale_saturate():
    weight = FP8.encode(torch.tensor([[1e-44, 9e-43, -9e-43]]))
    assert weight.codes.float().abs().max() == 448
    assert weight.decode().isfinite().all()


def test_encoding_what_was_decoded_gives_the_same_codes():
    once = FP8.encode(LAYERS["q_proj"])
    again = FP8.encode(once.decode())
    assert torch.equal(again.codes.float(), once.codes.float())
    assert torch.allclose(again.scales, once.scales, rtol=2**-22, atol=0)


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "tiny"])  # its scales are subnormal
def test_scales_of_four_significant_bits_make_an_operand_that_is_exact_in_bfloat16(layer):
    plain, exact = FP8.encode(LAYERS[layer]), FP8.encode_exact(LAYERS[layer])
    mantissas = exact.scales.double().frexp().mantissa * 16
    assert torch.equal(mantissas, mantissas.round())
    assert ((exact.scales >= plain.scales) & (exact.scales <= plain.scales * 1.125)).all()
    assert torch.equal(exact.operand(torch.bfloat16).float(), exact.decode())


def test_scales_of_four_significant_bits_cost_next_to_nothing():
    weight_NK = gaussian(1024, 1024)
    plain, exact = FP8.encode(weight_NK), FP8.encode_exact(weight_NK)
    assert rms_error(exact.decode(), weight_NK) < 1.02 * rms_error(plain.decode(), weight_NK)
