import pytest
import torch

from formats.layers import LAYERS, gaussian
from qerl.formats import MXFP4, NF4, NVFP4
from qerl.formats.block_scale import least_squares

BLOCKS = {NVFP4: 16, MXFP4: 32}


def block_errors(packed, weight_NK):
    size = BLOCKS[type(packed)]
    return (packed.decode().double() - weight_NK.double()).square().unflatten(1, (-1, size)).sum(-1)


@pytest.mark.parametrize("kind", [NVFP4, MXFP4])
@pytest.mark.parametrize("name", LAYERS)
def test_no_block_errs_more_than_with_plain_scales(kind, name):
    weight_NK = LAYERS[name]
    plain = kind.encode(weight_NK)
    ours = least_squares(plain, weight_NK)
    size_NB = weight_NK.double().square().unflatten(1, (-1, BLOCKS[kind])).sum(-1)
    # errors are compared in float32: equal ones may differ in their last bit
    assert (block_errors(ours, weight_NK) <= block_errors(plain, weight_NK) + 1e-6 * size_NB).all()


@pytest.mark.parametrize(("kind", "gain"), [(NVFP4, 0.90), (MXFP4, 0.999)])
def test_a_normal_weight_s_error_falls(kind, gain):
    weight_NK = gaussian(256, 1024)
    plain = kind.encode(weight_NK)
    ours = least_squares(plain, weight_NK)
    assert block_errors(ours, weight_NK).sum() < gain**2 * block_errors(plain, weight_NK).sum()


def test_a_block_is_searched_by_hand():
    # g = 2688 / 10.5 = 256. Plain: 5 / 6 * 256 = 213 -> 208, steps of 0.8125. Five E4M3 numbers above it is
    # 320, steps of 1.25: then the block is 4 3 2 1 without any error.
    weight_NK = torch.tensor([[5.0, 3.75, 2.5, 1.25] * 4 + [10.5] + [0.0] * 15])
    plain = NVFP4.encode(weight_NK)
    ours = least_squares(plain, weight_NK)
    assert plain.scales.tolist() == [[208.0, 448.0]] and ours.scales.tolist() == [[320.0, 448.0]]
    assert ours.codes[0, :2].tolist() == [0x56, 0x24]
    assert torch.equal(ours.decode(), weight_NK)
    assert torch.equal(ours.global_scale, plain.global_scale)


def test_other_formats_have_no_such_scales():
    weight_NK = gaussian(16, 256)
    with pytest.raises(AssertionError):
        least_squares(NF4.encode(weight_NK), weight_NK)
