"""GPTQ integers of 4 and 8 bits against integers that are packed here as AutoGPTQ packs them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.int_checkpoints import gptq_tensors, integers, write_quantized
from qerl.errors import UserError
from qerl.formats import INT8
from qerl.models.checkpoint.notices import checkpoint_notices
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder

CPU = torch.device("cpu")
CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}
K_PROJ = "model.layers.1.self_attn.k_proj"


def packed(group_size, *, bits=4, is_symmetric=True, seed=None, **options):
    def pack(weight_NK):
        x = integers(weight_NK, group_size, bits=bits, is_symmetric=is_symmetric, seed=seed)
        return gptq_tensors(x, bits=bits, **options), x.weight_NK

    return pack


def decoder_of(folder, format):
    checkpoint = locate(str(folder)).open()
    return build_decoder(checkpoint, format=format, compute=torch.float32, device=CPU, resident=False)


def check(folder, weights):
    checkpoint = locate(str(folder)).open()
    assert set(checkpoint.shapes) == set(weights)
    for name, expected in weights.items():
        assert torch.equal(checkpoint.read(name).float(), expected), name


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("seed", [None, 5], ids=["in order", "desc_act"])
def test_every_weight_is_code_minus_zero_times_scale(tmp_path, bits, is_v2, is_symmetric, seed):
    config = CONFIG | {"bits": bits, "sym": is_symmetric, "desc_act": seed is not None}
    config |= {"checkpoint_format": "gptq_v2"} if is_v2 else {}
    pack = packed(16, bits=bits, is_symmetric=is_symmetric, seed=seed, is_v2=is_v2)
    check(tmp_path, write_quantized(tmp_path, pack, config))


@pytest.mark.parametrize("bits", [4, 8])
def test_without_a_map_inputs_are_grouped_in_order(tmp_path, bits):
    pack = packed(32, bits=bits, is_symmetric=False, has_map=False)
    check(tmp_path, write_quantized(tmp_path, pack, CONFIG | {"bits": bits, "group_size": 32}))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_is_stored_as_the_largest_code(tmp_path, bits):
    def pack(weight_NK):
        x = integers(weight_NK.abs(), 16, bits=bits)
        assert x.z_GN.max() == 0
        return gptq_tensors(x, bits=bits), x.weight_NK

    check(tmp_path, write_quantized(tmp_path, pack, CONFIG | {"bits": bits}))


def test_modules_may_have_other_bits(tmp_path):
    def pack(weight_NK):
        bits = 8 if weight_NK.shape[0] == 96 else 4
        x = integers(weight_NK, 16, bits=bits)
        return gptq_tensors(x, bits=bits), x.weight_NK

    check(tmp_path, write_quantized(tmp_path, pack, CONFIG | {"dynamic": {"mlp": {"bits": 8}}}))


@pytest.mark.parametrize(("bits", "is_symmetric"), [(4, True), (4, False), (8, True)])
def test_one_group_for_all_inputs_is_int8_with_the_same_codes(tmp_path, bits, is_symmetric):
    config = CONFIG | {"group_size": -1, "bits": bits}
    weights = write_quantized(tmp_path, packed(-1, bits=bits, is_symmetric=is_symmetric), config)
    for name, linear in decoder_of(tmp_path, "int8").linears():
        assert isinstance(linear.weight, INT8)
        assert torch.equal(linear.weight.decode(), weights[f"model.{name}.weight"])
    assert checkpoint_notices(locate(str(tmp_path)).open(), "int8") == []


def test_8_bits_with_other_zero_points_are_decoded(tmp_path):
    config = CONFIG | {"group_size": -1, "bits": 8}
    check(tmp_path, write_quantized(tmp_path, packed(-1, bits=8, is_symmetric=False), config))
    (line,) = checkpoint_notices(locate(str(tmp_path)).open(), "int8")
    assert "GPTQ weights in int8 per channel are decoded and quantized again to int8" in line


def test_biases_of_0_of_a_class_without_biases_are_not_loaded(tmp_path):
    weights = write_quantized(tmp_path, packed(16), CONFIG, more={f"{K_PROJ}.bias": torch.zeros(32).half()})
    check(tmp_path, weights)
    decoder_of(tmp_path, "nvfp4")
    write_quantized(tmp_path, packed(16), CONFIG, more={f"{K_PROJ}.bias": torch.ones(32).half()})
    with pytest.raises(UserError, match=rf"unexpected tensor {K_PROJ}.bias"):
        decoder_of(tmp_path, "nvfp4")


def test_biases_of_a_class_that_has_them_are_loaded(tmp_path):
    check(tmp_path, write_quantized(tmp_path, packed(16), CONFIG, family="Qwen2"))
    assert f"{K_PROJ}.bias" in locate(str(tmp_path)).open().shapes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"checkpoint_format": "marlin"},
            "GPTQ 'marlin', which is not supported; supported are gptq and gptq_v2",
        ),
        ({"is_marlin_format": True}, "GPTQ 'marlin', which is not supported"),
        ({"checkpoint_format": ["gptq"]}, "is not supported"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path, changes, says):
    write_quantized(tmp_path, packed(16), CONFIG | changes)
    with pytest.raises(UserError, match=says):
        locate(str(tmp_path)).open()


@pytest.mark.parametrize("bits", [3, 16, None, "4"])
def test_other_bits_are_refused(tmp_path, bits):
    write_quantized(tmp_path, packed(16, has_map=False), CONFIG | {"bits": bits})
    with pytest.raises(UserError, match="GPTQ needs bits 4 or 8, got"):
        locate(str(tmp_path)).open()


WORDS = torch.zeros(8, 32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("qzeros", None, f"has no tensor {K_PROJ}.qzeros"),
        ("scales", None, f"has no tensor {K_PROJ}.scales"),
        ("g_idx", torch.full((64,), 4, dtype=torch.int32), "g_idx holds groups outside 0 to 3"),
        ("g_idx", torch.arange(-1, 63).int(), "g_idx holds groups outside 0 to 3"),
        ("g_idx", torch.zeros(63, dtype=torch.int32), "GPTQ needs bits 4 or 8"),
        ("g_idx", torch.zeros(0, dtype=torch.int32), "GPTQ needs bits 4 or 8"),
        ("scales", torch.full((4, 32), float("inf")).half(), "scales holds NaN or infinity"),
        ("scales", torch.ones(3, 32).half(), "must be"),
        ("scales", torch.ones(32).half(), "is not a matrix"),
        ("qweight", WORDS[0], "is not a matrix"),
        ("qweight", WORDS[:, :0], "is not a matrix"),
        ("qweight", WORDS.long(), "qweight must be torch.int32, is torch.int64"),
        ("qzeros", WORDS.float(), "must be"),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_one_line(tmp_path, part, value, says):
    write_quantized(tmp_path, packed(16), CONFIG)
    tensors = load_file(tmp_path / "model.safetensors") | {f"{K_PROJ}.{part}": value}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=says) as caught:
        decoder_of(tmp_path, "bf16")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_group_size_that_does_not_fit_is_refused(tmp_path):
    write_quantized(tmp_path, packed(16, has_map=False), CONFIG | {"group_size": 32})
    with pytest.raises(UserError, match="does not fit K = 96 and group_size 32"):
        locate(str(tmp_path)).open()
