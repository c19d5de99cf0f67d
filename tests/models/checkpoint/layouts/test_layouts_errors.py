"""Damaged checkpoints of other tools: every one is refused by one line that names what is wrong."""

import copy
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import stored_layouts
from models.family_rows import oracle, save
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder

MODULE = "model.layers.0.mlp.up_proj"
UNUSED = "input_scale", "input_scale_ub", "activation_scale"
JUNK = (None, 0, -1, 3, 1e30, "", "nonsense", [], [1], [0, 0], {}, True, {"num_bits": 4})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = oracle("Llama", hidden_size=64, intermediate_size=128, num_attention_heads=8, num_hidden_layers=1)
    return model, save(model, tmp_path_factory.mktemp("errors") / "float")


def load(folder, format="bf16"):
    return build_decoder(
        locate(str(folder)).open(),
        format=format,
        compute=torch.float32,
        device=torch.device("cpu"),
        resident=False,
    )


def refusal(folder):
    with pytest.raises(UserError) as caught:
        load(folder)
    said = str(caught.value)
    assert "\n" not in said and str(folder) in said
    return said


def damages(name, tensor):
    """(what was done, what replaces the tensor)."""
    yield "gone", None
    yield "another dtype", (tensor.float() if tensor.dtype != torch.float32 else tensor.double())
    yield "one dimension more", tensor[None, None].repeat(2, 3, *[1] * tensor.dim())
    if tensor.dim() == 2:
        yield "a row less", tensor[:-1]
        yield "a column less", tensor[:, :-1]
        yield "empty", tensor[:0]
    if "scale" in name and tensor.is_floating_point():
        yield "NaN", torch.full_like(tensor.float(), float("nan")).to(tensor.dtype)
    if tensor.dtype == torch.float8_e4m3fn and name == "weight":
        yield "NaN", torch.full_like(tensor.view(torch.uint8), 0x7F).view(tensor.dtype)
    if name == "weight_g_idx":
        yield "a group that is not there", tensor + 100
    if name == "weight_shape":
        yield "another shape", tensor * 2
        yield "no shape", tensor * 0


@pytest.mark.parametrize("layout", stored_layouts.ROWS)
def test_each_damaged_tensor_is_refused_by_a_line_that_names_it(model, tmp_path, layout):
    row, (oracle_model, source) = stored_layouts.ROWS[layout], model
    stored_layouts.write(row, oracle_model, source, tmp_path / layout)
    file = tmp_path / layout / "model.safetensors"
    tensors, num_refused = load_file(file), 0
    parts = [name for name in tensors if name.startswith(f"{MODULE}.") and not name.endswith(UNUSED)]
    for name in parts:
        for done, changed in damages(name.rpartition(".")[2], tensors[name]):
            if _is_harmless(layout, name, done):
                continue
            left = tensors | {name: changed}
            save_file({key: x.contiguous() for key, x in left.items() if x is not None}, file)
            assert MODULE in refusal(tmp_path / layout), (name, done)
            num_refused += 1
    assert num_refused >= 8


def _is_harmless(layout, name, done):
    """Scales of 8-bit and integer codes may have any float type, and a tensor without group indices or
    factors of the input is another valid checkpoint."""
    optional = name.endswith(("weight_g_idx", "pre_quant_scale"))
    return (done == "gone" and optional) or (done == "another dtype" and _any_float(layout, name))


def _any_float(layout, name):
    return name.endswith(("weight_scale", "weight_scale_inv")) and not layout.endswith("fp4")


@pytest.mark.parametrize("layout", stored_layouts.ROWS)
def test_a_cut_file_is_refused(model, tmp_path, layout):
    row, (oracle_model, source) = stored_layouts.ROWS[layout], model
    stored_layouts.write(row, oracle_model, source, tmp_path / layout)
    file = tmp_path / layout / "model.safetensors"
    whole = file.read_bytes()
    for num_bytes in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:num_bytes])
        refusal(tmp_path / layout)


def paths_of(value, at=()):
    """Paths of all entries of nested dicts and lists."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield (*at, key)
        yield from paths_of(inner, (*at, key))


def changed_at(config, path, value):
    changed = inner = copy.deepcopy(config)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


CONFIGS = "ct-nvfp4", "ct-int4-group", "ct-fp8-block", "modelopt-nvfp4", "fp8-128"


@pytest.mark.parametrize("layout", CONFIGS)
def test_no_quantization_config_makes_a_traceback(model, tmp_path, layout):
    row, (oracle_model, source) = stored_layouts.ROWS[layout], model
    stored_layouts.write(row, oracle_model, source, tmp_path / layout)
    file, rng = tmp_path / layout / "config.json", random.Random(0)
    config, num_refused = json.loads(file.read_text()), 0
    changes = [(path, junk) for path in paths_of(config["quantization_config"]) for junk in JUNK]
    for path, junk in rng.sample(changes, min(len(changes), 60)):
        changed = changed_at(config["quantization_config"], path, junk)
        file.write_text(json.dumps(config | {"quantization_config": changed}))
        try:
            load(tmp_path / layout)
        except UserError as error:
            num_refused += 1
            assert "\n" not in str(error)
    assert num_refused > 3
    file.write_text(json.dumps(config))
    load(tmp_path / layout)


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "hqq"}, "is quantized with hqq, which is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt NVFP4, but has no quantized weight"),
        ({"quant_method": "fp8"}, "is quantized with fp8, but no weight is in FP8"),
        ({"quant_method": "compressed-tensors"}, "config has no config_groups"),
        (
            stored_layouts.INT4.config | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "with sparsity sparse-24-bitmask is not supported",
        ),
        (stored_layouts.INT4.config | {"transform_config": {"config_groups": {"u": {}}}}, "transforms"),
    ],
)
def test_what_is_not_supported_is_said_by_name(model, tmp_path, quantization, says):
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((model[1] / "config.json").read_text()) | {"quantization_config": quantization})
    )
    (tmp_path / "model.safetensors").write_bytes((model[1] / "model.safetensors").read_bytes())
    assert says in refusal(tmp_path)
