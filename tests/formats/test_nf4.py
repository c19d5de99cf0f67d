"""NF4 with double quantization: bitsandbytes' bits."""

import bitsandbytes.functional
import pytest
import torch

from formats.layers import LAYERS, gaussian
from formats.oracles import bitsandbytes_nf4
from qerl.errors import UserError
from qerl.formats import NF4, nf4


@pytest.mark.parametrize("layer", LAYERS)
def test_encoding_gives_the_bits_of_bitsandbytes(layer):
    codes, absmax_codes, absmax_scales, offset, decoded = bitsandbytes_nf4(LAYERS[layer])
    ours = NF4.encode(LAYERS[layer])
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.absmax_offset, offset)
    assert torch.equal(ours.absmax_scales, absmax_scales)
    assert torch.equal(ours.absmax_codes, absmax_codes)
    assert torch.equal(ours.decode(), decoded)


def test_levels_and_dynamic_map_are_those_of_bitsandbytes():
    cpu = torch.device("cpu")
    levels = bitsandbytes.functional.get_4bit_type("nf4", device="cpu")
    assert torch.equal(torch.tensor(nf4.LEVELS), levels)
    assert torch.equal(nf4.dynamic_map(cpu), bitsandbytes.functional.create_dynamic_map())


def test_every_absmax_is_quantized_as_bitsandbytes_does_it():
    centred = torch.cat([torch.ones(1), torch.linspace(-1, 1, 256 * 300 + 99)])
    centred = centred.view(-1, 100).T.flatten()  # every group spans the range
    codes, scales = nf4._quantize_absmax(centred)
    theirs, state = bitsandbytes.functional.quantize_blockwise(centred, blocksize=256)
    assert torch.equal(codes, theirs)
    assert torch.equal(scales, state.absmax)


def test_floats_beside_every_change_of_code_are_quantized_as_bitsandbytes_does_it():
    codes = nf4._codes_on_grid(torch.device("cpu")).int()
    last_of_code = (codes[1:] != codes[:-1]).nonzero()
    edges = (last_of_code + 0.5) * 2 / 65535 - 1
    near = (edges + torch.arange(-12, 13) * 2**-25).flatten()
    groups = torch.nn.functional.pad(near[: len(near) // 255 * 255].view(-1, 255), (1, 0), value=1.0)
    theirs, _ = bitsandbytes.functional.quantize_blockwise(groups.flatten(), blocksize=256)
    assert len(theirs.unique()) > 240
    assert torch.equal(nf4._quantize_absmax(groups.flatten())[0], theirs)


def test_every_code_decodes_to_its_level_high_nibble_first():
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    one = NF4(codes, torch.full((8,), 255, dtype=torch.uint8), torch.ones(1), torch.zeros(()))
    levels = torch.tensor(nf4.LEVELS)
    expected = torch.stack([levels[codes.long() >> 4], levels[codes.long() & 15]], dim=-1).flatten(1)
    assert torch.equal(one.decode(), expected)


def test_halfway_between_two_levels_goes_to_the_lower_one():
    levels = torch.tensor(nf4.LEVELS)
    middles = (levels[:-1] + levels[1:]) / 2
    weight_NK = torch.zeros(2, 64)
    weight_NK[0, 1:16] = middles
    weight_NK[1, 1:16] = torch.nextafter(middles, torch.ones(15))
    weight_NK[:, 0] = 1
    codes = NF4.encode(weight_NK).codes
    codes = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(1)
    assert codes[0, 1:16].tolist() == list(range(15))
    assert codes[1, 1:16].tolist() == list(range(1, 16))


def test_codes_are_kept_when_what_was_decoded_is_encoded():
    once = NF4.encode(gaussian(192, 576))
    assert torch.equal(NF4.encode(once.decode()).codes, once.codes)


def test_a_sum_of_scales_beyond_float32_is_refused():
    with pytest.raises(UserError, match=r"overflows in a weight of shape \[64, 256\]"):
        NF4.encode(torch.full((64, 256), 3e37))
