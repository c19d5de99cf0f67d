"""INT8: one scale for each output, symmetric."""

import pytest
import torch

from formats.layers import LAYERS
from qerl.formats import INT8


def test_every_code_decodes_to_itself_times_its_rows_scale():
    codes = torch.arange(-127, 128).to(torch.int8).repeat(2, 1)
    weight = INT8(codes, torch.tensor([0.5, 3.0]))
    assert torch.equal(weight.decode(), codes.float() * torch.tensor([[0.5], [3.0]]))
    assert torch.equal(weight.operand(torch.bfloat16).double(), codes.double())


def test_ties_go_to_the_even_code_and_the_ends_are_symmetric():
    weight_NK = torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    assert INT8.encode(weight_NK).codes.tolist() == [[127, -127, 0, 2, 2, 0, -2, -2, 126]]


@pytest.mark.parametrize("layer", LAYERS)
def test_no_weight_is_further_than_half_a_step(layer):
    weight_NK = LAYERS[layer]
    weight = INT8.encode(weight_NK)
    assert (weight.codes.abs().amax(1) == torch.where(weight_NK.any(1), 127, 0)).all()
    error = (weight.decode().double() - weight_NK.double()).abs()
    assert (error <= weight.scales.double()[:, None] * 0.5001).all()


def test_rows_do_not_depend_on_each_other():
    weight_NK = LAYERS["k_proj"]
    rows = [INT8.encode(weight_NK[i : i + 1]).codes for i in range(20)]
    assert torch.equal(torch.cat(rows), INT8.encode(weight_NK).codes[:20])


def test_a_row_of_zeros_decodes_to_zeros():
    weight = INT8.encode(torch.zeros(2, 5))
    assert weight.scales.tolist() == [1, 1]
    assert not weight.decode().any()


def test_weights_too_small_for_their_own_scale_saturate():
    weight = INT8.encode(torch.tensor([[2e-43, -2e-43, 1e-44]]))
    assert weight.codes.tolist()[0][:2] == [127, -127]


def test_encoding_what_was_decoded_gives_the_same_codes():
    once = INT8.encode(LAYERS["q_proj"])
    again = INT8.encode(once.decode())
    assert torch.equal(again.codes, once.codes)
    assert torch.allclose(again.scales, once.scales, rtol=2**-22, atol=0)
