"""AWQ int4 against integers that are packed here as AutoAWQ packs them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.int_checkpoints import awq_tensors, integers, write_float, write_quantized
from qerl.errors import UserError
from qerl.formats import BF16, INT8
from qerl.models.checkpoint.notices import checkpoint_notices
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder

CPU = torch.device("cpu")
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def packed(group_size, **options):
    def pack(weight_NK):
        x = integers(weight_NK, group_size, **options)
        return awq_tensors(x), x.weight_NK

    return pack


def decoder_of(folder, format):
    checkpoint = locate(str(folder)).open()
    return build_decoder(checkpoint, format=format, compute=torch.float32, device=CPU, resident=False)


def linears_of(decoder):
    return {f"model.{name}": linear for name, linear in decoder.linears()}


@pytest.mark.parametrize("group_size", [16, 32, -1])
@pytest.mark.parametrize("version", ["gemm", "GEMM", None])
def test_every_weight_is_code_minus_zero_times_scale(tmp_path, group_size, version):
    config = CONFIG | {"group_size": group_size, "version": version}
    weights = write_quantized(tmp_path, packed(group_size), config)
    checkpoint = locate(str(tmp_path)).open()
    assert set(checkpoint.shapes) == set(weights)
    for name, expected in weights.items():
        assert torch.equal(checkpoint.read(name).float(), expected), name


@pytest.mark.parametrize("format", ["nvfp4", "nf4", "int8", "bf16"])
def test_codes_with_groups_are_quantized_again_as_the_same_weights_in_float(tmp_path, format):
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    weights = write_quantized(tmp_path / "awq", packed(16), CONFIG, **sizes)
    found = linears_of(decoder_of(tmp_path / "awq", format))
    expected = linears_of(decoder_of(write_float(tmp_path / "float", weights, **sizes), format))
    for name, linear in found.items():
        for field, tensor in linear.weight.tensors().items():
            assert torch.equal(tensor, expected[name].weight.tensors()[field]), (name, field)
    (line,) = checkpoint_notices(locate(str(tmp_path / "awq")).open(), format)
    assert f"AWQ weights in int4 per 16 are decoded and quantized again to {format}" in line


def test_one_group_for_all_inputs_is_int8_with_the_same_codes(tmp_path):
    weights = write_quantized(tmp_path, packed(-1), CONFIG | {"group_size": -1})
    checkpoint = locate(str(tmp_path)).open()
    for name, linear in linears_of(decoder_of(tmp_path, "int8")).items():
        assert isinstance(linear.weight, INT8)
        assert torch.equal(linear.weight.decode(), weights[f"{name}.weight"])
    assert checkpoint_notices(checkpoint, "int8") == []
    assert "--model.format int8 loads them as they are" in checkpoint_notices(checkpoint, "nvfp4")[0]


def test_modules_that_were_not_converted_stay_in_bf16(tmp_path):
    config = CONFIG | {"modules_to_not_convert": ["o_proj"]}
    weights = write_quantized(tmp_path, packed(16), config, skipped=("o_proj",))
    linear = linears_of(decoder_of(tmp_path, "nvfp4"))["model.layers.1.self_attn.o_proj"]
    assert isinstance(linear.weight, BF16)
    assert torch.equal(linear.weight.decode(), weights["model.layers.1.self_attn.o_proj.weight"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": "gemv"}, "AWQ 'gemv', which is not supported; supported is gemm"),
        ({"version": "marlin"}, "AWQ 'marlin', which is not supported"),
        ({"version": 7}, "AWQ 7, which is not supported"),
        ({"bits": 8}, "AWQ needs bits 4, got 8"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path, changes, says):
    write_quantized(tmp_path, packed(16), CONFIG | changes)
    with pytest.raises(UserError, match=says):
        locate(str(tmp_path)).open()


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("qzeros", None, f"has no tensor {Q_PROJ}.qzeros"),
        ("scales", None, f"has no tensor {Q_PROJ}.scales"),
        ("scales", torch.ones(4, 56).half(), r"scales is \[4, 56\], must be \[K / group, 64\] with K = 64"),
        ("scales", torch.ones(5, 64).half(), r"scales is \[5, 64\], must be"),
        ("scales", torch.ones(64).half(), r"scales is \[64\], must be"),
        ("scales", torch.full((4, 64), float("nan")).half(), "scales holds NaN or infinity"),
        ("scales", torch.ones(4, 64, dtype=torch.int32), "scales must be torch.float16 or"),
        ("qzeros", torch.zeros(2, 8, dtype=torch.int32), r"qzeros is \[2, 8\], must be \[4, 8\]"),
        ("qzeros", torch.zeros(4, 8), "qzeros must be torch.int32, is torch.float32"),
        ("qweight", torch.zeros(64, dtype=torch.int32), r"qweight is \[64\], must be \[K, N / 8\]"),
        ("qweight", torch.zeros(64, 4, dtype=torch.int32), "must be"),
        ("qweight", torch.zeros(64, 8, dtype=torch.int64), "qweight must be torch.int32, is torch.int64"),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_one_line(tmp_path, part, value, says):
    write_quantized(tmp_path, packed(16), CONFIG)
    tensors = load_file(tmp_path / "model.safetensors") | {f"{Q_PROJ}.{part}": value}
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=says) as caught:
        decoder_of(tmp_path, "bf16")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_file_that_is_cut_is_one_line(tmp_path):
    write_quantized(tmp_path, packed(16), CONFIG)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for num_bytes in range(8, len(whole), len(whole) // 20):
        file.write_bytes(whole[:num_bytes])
        with pytest.raises(UserError, match="truncated"):
            locate(str(tmp_path)).open()
