"""Checkpoints that transformers and bitsandbytes write on a CPU, against what bitsandbytes decodes."""

import json
import warnings

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from models.family_rows import oracle
from qerl.errors import UserError
from qerl.formats import INT8, NF4
from qerl.models.checkpoint.notices import checkpoint_notices
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"head_dim": 64, "num_hidden_layers": 1}
NF4_CONFIG = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
KINDS = {
    "nf4": NF4_CONFIG,
    "nf4-single": NF4_CONFIG | {"bnb_4bit_use_double_quant": False},
    "fp4": NF4_CONFIG | {"bnb_4bit_quant_type": "fp4"},
    "fp4-single": NF4_CONFIG | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "bf16-storage": NF4_CONFIG | {"bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, transformers' quantized model) of a kind, each made once."""
    folder, made = tmp_path_factory.mktemp("bnb"), {}
    oracle("Qwen2", **SIZES).save_pretrained(folder / "float")

    def of(kind: str):
        if kind not in made:
            config = BitsAndBytesConfig(**KINDS[kind])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = AutoModelForCausalLM.from_pretrained(
                    folder / "float", quantization_config=config, device_map="cpu", dtype=torch.float32
                )
                model.save_pretrained(folder / kind)
            made[kind] = folder / kind, model
        return made[kind]

    return of


def opened(folder):
    return locate(str(folder)).open()


def linears_of(folder, format):
    decoder = build_decoder(opened(folder), format=format, compute=torch.float32, device=CPU, resident=False)
    return {f"model.{name}": linear.weight for name, linear in decoder.linears()}


def four_bit(model):
    """Return what bitsandbytes decodes each quantized weight to."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            codes, state = module.weight.data.view(torch.uint8).view(-1, 1), module.weight.quant_state
            found[name] = bitsandbytes.functional.dequantize_4bit(codes, state)
    assert len(found) == 7
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8"])
def test_four_bit_weights_decode_to_what_bitsandbytes_decodes(saved, kind):
    folder, model = saved(kind)
    checkpoint = opened(folder)
    for name, expected in four_bit(model).items():
        assert torch.equal(checkpoint.read(f"{name}.weight"), expected), name


@pytest.mark.parametrize("kind", ["nf4", "bf16-storage"])
def test_nf4_is_loaded_with_the_stored_codes(saved, kind):
    folder, model = saved(kind)
    stored, decoded = load_file(folder / "model.safetensors"), four_bit(model)
    for name, weight in linears_of(folder, "nf4").items():
        assert isinstance(weight, NF4)
        codes = stored[f"{name}.weight"].view(torch.uint8)
        assert torch.equal(weight.codes.flatten(), codes.flatten())
        assert torch.equal(weight.absmax_codes, stored[f"{name}.weight.absmax"])
        assert torch.equal(weight.absmax_scales, stored[f"{name}.weight.nested_absmax"])
        assert torch.equal(weight.decode(), decoded[name])
    assert checkpoint_notices(opened(folder), "nf4") == []


def test_other_codes_are_quantized_again_and_said_so(saved):
    for kind, words in {
        "nf4-single": "NF4 per 64",
        "fp4": "FP4 per 64 with double quantization",
        "fp4-single": "FP4 per 64",
    }.items():
        (line,) = checkpoint_notices(opened(saved(kind)[0]), "nf4")
        assert f"bitsandbytes weights in {words} are decoded and quantized again to nf4" in line
        assert all(isinstance(weight, NF4) for weight in linears_of(saved(kind)[0], "nf4").values())
    (line,) = checkpoint_notices(opened(saved("nf4")[0]), "nvfp4")
    assert "(--model.format nf4 loads them as they are)" in line


def test_int8_is_loaded_with_the_stored_codes(saved):
    folder, _ = saved("int8")
    stored = load_file(folder / "model.safetensors")
    for name, weight in linears_of(folder, "int8").items():
        assert isinstance(weight, INT8)
        codes, largest = stored[f"{name}.weight"], stored[f"{name}.SCB"]
        assert torch.equal(weight.codes, codes)
        expected = bitsandbytes.functional.int8_vectorwise_dequant(codes, largest)
        torch.testing.assert_close(weight.decode(), expected, rtol=3e-7, atol=0)
    (line,) = checkpoint_notices(opened(folder), "int8")
    assert "quantization of activations to 8 bits is dropped" in line


def changed(saved, tmp_path, kind, changes):
    folder, _ = saved(kind)
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path


UP = "model.layers.0.mlp.up_proj"
STATE = f"{UP}.weight.quant_state.bitsandbytes__nf4"
GOOD = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [192, 128]}
GOOD |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}


def json_tensor(value) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def test_another_nested_map_is_decoded_with_it(saved, tmp_path):
    name = f"{UP}.weight.nested_quant_map"
    other = torch.linspace(-1, 1, 256)
    folder = changed(saved, tmp_path, "nf4", {name: other})
    stored = load_file(folder / "model.safetensors")
    parts = {name: tensor for name, tensor in stored.items() if name.startswith(f"{UP}.weight.")}
    state = bitsandbytes.functional.QuantState.from_dict(parts, device=CPU)
    expected = bitsandbytes.functional.dequantize_4bit(stored[f"{UP}.weight"], state)
    assert opened(folder).stored(UP).format is None
    assert torch.equal(opened(folder).read(f"{UP}.weight"), expected)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (f"{UP}.weight.absmax", None, "has no tensor"),
        (f"{UP}.weight.nested_absmax", None, "has no tensor"),
        (f"{UP}.weight.quant_map", torch.ones(15), r"quant_map is \[15\], must be \[16\]"),
        (f"{UP}.weight.absmax", torch.ones(384), "absmax must be torch.uint8, is torch.float32"),
        (f"{UP}.weight.nested_absmax", torch.full((2,), torch.nan), "nested_absmax holds NaN or infinity"),
        (f"{UP}.weight", torch.zeros(12288, dtype=torch.uint8), r"must be \[12288, 1\]"),
        (STATE, torch.tensor([123, 34], dtype=torch.uint8), "is not JSON"),
        (STATE, torch.tensor([255, 254], dtype=torch.uint8), "is not JSON"),
        (STATE, json_tensor([1]), "must hold a JSON object"),
        (STATE, json_tensor(GOOD | {"shape": [192]}), "has no shape of two numbers"),
        (STATE, json_tensor(GOOD | {"shape": [192, -128]}), "has no shape of two numbers"),
        (STATE, json_tensor(GOOD | {"shape": [191, 128]}), "must be"),
        (STATE, json_tensor(GOOD | {"blocksize": 0}), "or no blocksize"),
        (STATE, json_tensor(GOOD | {"nested_blocksize": 0}), "has no nested_blocksize and nested_offset"),
        (STATE, json_tensor(GOOD | {"nested_offset": None}), "has no nested_blocksize and nested_offset"),
    ],
)
def test_tensors_that_do_not_fit_are_named_in_one_line(saved, tmp_path, name, value, says):
    folder = changed(saved, tmp_path, "nf4", {name: value})
    with pytest.raises(UserError, match=says) as caught:
        linears_of(folder, "nf4")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (f"{UP}.weight_format", torch.tensor(1, dtype=torch.uint8), "weight_format must be 0"),
        (f"{UP}.SCB", torch.full((192,), torch.inf), "SCB holds NaN or infinity"),
        (f"{UP}.SCB", torch.ones(64), r"SCB is \[64\], must be \[192\]"),
        (f"{UP}.weight", torch.ones(192, 128), "weight must be torch.int8"),
        (f"{UP}.weight", None, "must have two dimensions"),
    ],
)
def test_int8_tensors_that_do_not_fit_are_named_in_one_line(saved, tmp_path, name, value, says):
    folder = changed(saved, tmp_path, "int8", {name: value})
    with pytest.raises(UserError, match=says) as caught:
        linears_of(folder, "int8")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
