"""Claims that hold for every format."""

import typing

import pytest
import torch

from formats.layers import LAYERS, gaussian
from qerl.config import ModelConfig
from qerl.errors import UserError
from qerl.formats import FORMATS, e2m1, nf4

# |decoded - W| / |W| of a normal [1024, 1024] layer over three seeds, give or take 1.5 %.
RELATIVE_ERROR = {
    "nvfp4": (0.0940, 0.0963),
    "mxfp4": (0.1105, 0.1138),
    "nf4": (0.0906, 0.0934),
    "fp8": (0.0260, 0.0269),
    "fp8-flow": (0.0260, 0.0269),
    "int8": (0.0077, 0.0081),
    "bf16": (0.00163, 0.00169),
}
ALL = pytest.mark.parametrize("name", FORMATS)


def test_the_config_names_the_formats():
    assert set(typing.get_args(typing.get_type_hints(ModelConfig)["format"])) == set(FORMATS)
    assert all(FORMATS[name].name == name for name in FORMATS)


@ALL
def test_decoding_is_alpha_times_the_operand(name):
    weight = FORMATS[name].encode(LAYERS["q_proj"])
    assert weight.alpha.dtype == torch.float32 and weight.alpha.shape in ((), (576,))
    expected = weight.operand(torch.float32) * weight.alpha.expand(576)[:, None]
    assert torch.equal(weight.decode(), expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int8"])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_operand_is_exact_in_bfloat16(name, layer):
    weight = FORMATS[name].encode(LAYERS[layer])
    assert torch.equal(weight.operand(torch.bfloat16).float(), weight.operand(torch.float32))


@ALL
def test_the_operand_is_the_float32_one_rounded(name):
    weight = FORMATS[name].encode(gaussian(192, 576))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        operand = weight.operand(dtype)
        assert operand.dtype == dtype and operand.is_contiguous()
        assert torch.equal(operand, weight.operand(torch.float32).to(dtype))


@ALL
def test_the_relative_error_of_a_normal_layer_is_the_known_one(name):
    weight_NK = gaussian(1024, 1024, seed=3)
    error = (FORMATS[name].encode(weight_NK).decode() - weight_NK).norm() / weight_NK.norm()
    low, high = RELATIVE_ERROR[name]
    assert low < error < high


@ALL
@pytest.mark.parametrize("shape", [(576, 576), (192, 1536)])
def test_num_bytes_is_bytes_per_weight_times_weights(name, shape):
    weight = FORMATS[name].encode(gaussian(*shape))
    assert weight.shape == shape
    beyond = weight.num_bytes - weight.bytes_per_weight * shape[0] * shape[1]
    ragged_scales, scale_of_each_row = 4 * 8 * 3, 4 * shape[0]
    assert 0 <= beyond <= (scale_of_each_row if name == "int8" else ragged_scales)


@ALL
def test_the_tensors_are_the_whole_weight(name):
    weight = FORMATS[name].encode(LAYERS["k_proj"])
    again = type(weight)(**weight.tensors())
    assert torch.equal(again.decode(), weight.decode())
    assert weight.num_bytes == sum(t.numel() * t.element_size() for t in weight.tensors().values())
    moved = weight.to(torch.device("meta"))
    assert all(t.is_meta for t in moved.tensors().values()) and moved.alpha.is_meta


@ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_encoded_as_their_float32_values(name, dtype):
    weight_NK = gaussian(64, 576).to(dtype)
    expected = FORMATS[name].encode(weight_NK.float())
    assert torch.equal(FORMATS[name].encode(weight_NK).decode(), expected.decode())


@ALL
def test_a_transposed_weight_is_encoded_as_its_copy(name):
    weight_NK = gaussian(576, 192).T
    expected = FORMATS[name].encode(weight_NK.contiguous())
    assert torch.equal(FORMATS[name].encode(weight_NK).decode(), expected.decode())


@ALL
def test_encoding_leaves_the_weight_as_it_was(name):
    weight_NK = LAYERS["k_proj"].clone()
    FORMATS[name].encode(weight_NK).decode()
    assert torch.equal(weight_NK, LAYERS["k_proj"])


@ALL
def test_encoding_what_was_decoded_moves_no_weight_by_more_than_its_scales_rounding(name):
    once = FORMATS[name].encode(gaussian(192, 576)).decode()
    again = FORMATS[name].encode(once).decode()
    # NF4's second quantization has 8 bits for the deviation of a scale from the mean.
    tolerance = {"mxfp4": 0.0, "bf16": 0.0, "nf4": 0.01}.get(name, 2**-22)
    assert ((again - once).abs() <= once.abs() * tolerance).all()


@ALL
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(name, wrong):
    weight_NK = gaussian(192, 2560)
    weight_NK[190, 2559] = wrong
    with pytest.raises(UserError, match=rf"{name}: .*NaN or infinity in a weight of shape \[192, 2560\]"):
        FORMATS[name].encode(weight_NK)


@ALL
def test_a_double_beyond_float32_is_refused(name):
    with pytest.raises(UserError, match="infinity"):
        FORMATS[name].encode(torch.full((16, 64), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("name, columns", [("nvfp4", 24), ("mxfp4", 48), ("nf4", 96)])
def test_a_width_that_is_no_multiple_of_the_block_is_refused(name, columns):
    with pytest.raises(UserError, match=rf"{name}: K must be a multiple of .*\[16, {columns}\]"):
        FORMATS[name].encode(gaussian(16, columns))


@ALL
@pytest.mark.parametrize("shape", [(0, 64), (64,), (2, 2, 64)])
def test_what_is_no_matrix_is_refused(name, shape):
    with pytest.raises(UserError, match=f"{name}: the weight must be two-dimensional"):
        FORMATS[name].encode(torch.zeros(shape))


@ALL
def test_an_operand_first_made_for_inference_can_be_learned_through(name):
    for table in (e2m1._pairs, nf4._pairs, nf4.dynamic_map, nf4._codes_on_grid):
        table.cache_clear()
    weight = FORMATS[name].encode(gaussian(16, 64))
    with torch.inference_mode():
        weight.operand(torch.float32)
    x_TK = torch.ones(3, 64, requires_grad=True)
    (weight.alpha * (x_TK @ weight.operand(torch.float32).T)).sum().backward()
    assert torch.allclose(x_TK.grad[0], weight.decode().sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@ALL
@pytest.mark.parametrize("layer", LAYERS)
def test_a_gpu_encodes_and_decodes_to_the_same_bits(name, layer):
    here = FORMATS[name].encode(LAYERS[layer])
    there = FORMATS[name].encode(LAYERS[layer].cuda())
    assert torch.equal(here.to("cuda").decode().cpu(), here.decode())
    if name == "nf4":  # the mean differs in its last bit
        assert torch.equal(there.codes.cpu(), here.codes)
        assert torch.allclose(there.decode().cpu(), here.decode(), rtol=0.02)
    else:
        for key, tensor in there.tensors().items():
            assert torch.equal(tensor.cpu().view(torch.uint8), here.tensors()[key].view(torch.uint8))


def test_bf16_keeps_a_bfloat16_tensor_and_rounds_others():
    weight_NK = gaussian(8, 8).bfloat16()
    assert FORMATS["bf16"].encode(weight_NK).operand(torch.bfloat16) is weight_NK
    tie = 1 + 2**-8  # halfway between 1 and the next bfloat16
    assert FORMATS["bf16"].encode(torch.tensor([[tie, 1 + 3 * 2**-8, 3.4e38]])).decode().tolist() == [
        [1, 1 + 2**-6, torch.finfo(torch.bfloat16).max]
    ]
