"""Checkpoints of other tools: codes and logits of every family are those of the tools' own decoding."""

import copy
import functools
import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from conftest import rms_error
from models import stored_layouts
from models.family_rows import ROWS as FAMILIES
from models.family_rows import multimodal, oracle, save
from models.tiny import logits_of
from qerl.learner.plan.shapes import read_layout
from qerl.models.checkpoint.notices import checkpoint_notices
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.quantize.quantization_check import check_quantization

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
CHANGES = {
    "GraniteMoeHybrid": {"shared_intermediate_size": 128},
    "Qwen3_5": {"linear_num_value_heads": 16, "linear_value_head_dim": 4},
    "Qwen3Next": {"linear_num_value_heads": 16, "linear_value_head_dim": 4},
}
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    @functools.cache
    def made(family, tied=False):
        model = oracle(family, **WIDE, **CHANGES.get(family, {}), tie_word_embeddings=tied)
        return model, save(model, tmp_path_factory.mktemp(family) / "float")

    return made


def load(folder, format):
    checkpoint = locate(str(folder)).open()
    return build_decoder(
        checkpoint, format=format, compute=torch.float32, device=torch.device("cpu"), resident=True
    )


EVERY_LAYOUT = "Llama", "Phi3", "Qwen3_5"  # of plain linears, of fused ones, of Gated DeltaNet
SOME = "ct-nvfp4", "ct-int4-asymmetric", "ct-fp8-channel", "modelopt-nvfp4", "fp8-128"
MIXTURES = "GptOss", "GraniteMoe", "Olmoe", "Qwen3Moe"  # of experts: test_mixture_loading.py
CASES = [
    (family, layout)
    for family in FAMILIES
    if family not in MIXTURES
    for layout in (stored_layouts.ROWS if family in EVERY_LAYOUT else SOME)
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logits_are_those_of_transformers_with_the_decoded_weights(model_of, tmp_path, family, layout):
    row, (model, source) = stored_layouts.ROWS[layout], model_of(family)
    truth = stored_layouts.write(row, model, source, tmp_path / layout)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight_NK in truth.items():
            model.get_parameter(name).copy_(weight_NK if row.format else weight_NK.bfloat16())
        theirs_TV = model(TOKENS[None]).logits[0]
    ours_TV = logits_of(load(tmp_path / layout, row.format or "bf16"), TOKENS)
    assert rms_error(ours_TV, theirs_TV) < 1e-5


@pytest.mark.parametrize("layout", [name for name, row in stored_layouts.ROWS.items() if row.format])
def test_codes_that_fit_a_format_are_loaded_without_a_change(model_of, tmp_path, layout):
    row, (model, source) = stored_layouts.ROWS[layout], model_of("Llama")
    stored_layouts.write(row, model, source, tmp_path / layout)
    checkpoint = locate(str(tmp_path / layout)).open()
    decoder = load(tmp_path / layout, row.format)
    for name, linear in decoder.linears():
        weight = linear.weight
        assert weight.name == row.format
        state = row.compress(model.get_parameter(f"model.{name}.weight"))
        stored = state.get("weight_packed", state.get("weight"))
        if stored.dtype == torch.int32:
            zeros = stored_layouts.zero_points(state)
            stored = stored_layouts.compressed_codes(state) - zeros
        assert torch.equal(weight.codes.view(torch.uint8), stored.view(torch.uint8))
        assert checkpoint.stored(f"model.{name}").kind == row.kind


LOADED = (
    *("ct-fp8-tensor", "ct-fp8-channel", "ct-fp8-block", "ct-int8-channel", "ct-int8-asymmetric"),
    *("ct-int4-group", "ct-int4-asymmetric", "ct-int4-channel", "fp8-128"),
)


@pytest.mark.parametrize("layout", LOADED)
def test_weights_and_logits_are_those_that_transformers_loads(model_of, tmp_path, layout):
    row, (model, source) = stored_layouts.ROWS[layout], model_of("Qwen2")
    stored_layouts.write(row, model, source, tmp_path / layout)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / layout, dtype=torch.float32)
    with torch.no_grad():
        theirs_TV = loaded(TOKENS[None]).logits[0]  # the first forward decompresses
    checkpoint = locate(str(tmp_path / layout)).open()
    for name in stored_layouts.linears_of(model):
        theirs = loaded.get_submodule(name).weight.float()
        assert torch.equal(checkpoint.read(f"{name}.weight"), theirs)
    ours_TV = logits_of(load(tmp_path / layout, row.format or "bf16"), TOKENS)
    assert rms_error(ours_TV, theirs_TV) < (1e-5 if row.format else 1e-2)  # bf16 rounds the weights


def mixed_config(groups, ignore=("lm_head",)):
    """`groups`: (targets, row)."""
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            f"group_{i}": row.config["config_groups"]["group_0"]
            | {"targets": targets, "format": row.config["format"]}
            for i, (targets, row) in enumerate(groups)
        },
        "ignore": list(ignore),
    }


def test_each_module_has_the_scheme_of_the_group_that_targets_it_best(model_of, tmp_path):
    model, source = model_of("Llama")
    rows = {name: stored_layouts.ROWS[name] for name in ("ct-nvfp4", "ct-fp8-channel", "ct-int4-group")}
    nvfp4, fp8, int4 = rows.values()
    named = "model.layers.2.mlp.down_proj"
    config = mixed_config([(["Linear"], nvfp4), (["re:.*self_attn.*"], fp8), ([named], int4)])
    config["ignore"] += ["re:.*layers.0.*"]
    linears = [name for name in stored_layouts.linears_of(model) if ".layers.0." not in name]
    chosen = {name: fp8 if "self_attn" in name else int4 if name == named else nvfp4 for name in linears}
    truth = stored_layouts.write_mixed(chosen, config, source, tmp_path / "mixed")
    checkpoint = locate(str(tmp_path / "mixed")).open()
    assert {name: checkpoint.stored(name).kind for name in linears} == {
        name: row.kind for name, row in chosen.items()
    }
    decoder = load(tmp_path / "mixed", "nvfp4")
    for name, linear in decoder.linears():
        row, weight = chosen.get(f"model.{name}"), linear.weight
        assert weight.name == ("bf16" if row is None else "nvfp4")
        if row is nvfp4:
            assert torch.equal(weight.decode(), truth[f"model.{name}.weight"])
    (line,) = checkpoint_notices(checkpoint, "nvfp4")
    assert "weights in FP8 per channel and int4 per 16 are decoded and quantized again to nvfp4" in line


def test_a_quantized_head_and_embedding_are_decoded(model_of, tmp_path):
    model, source = model_of("Llama")
    row = stored_layouts.ROWS["ct-int4-group"]
    modules = [*stored_layouts.linears_of(model), "lm_head", "model.embed_tokens"]
    config = row.config | {"ignore": []}
    truth = stored_layouts.write_mixed(dict.fromkeys(modules, row), config, source, tmp_path / "all")
    decoder = load(tmp_path / "all", "bf16")
    assert torch.equal(decoder.lm_head.weight, truth["lm_head.weight"])
    assert torch.equal(decoder.embed_tokens.weight, truth["model.embed_tokens.weight"])


@pytest.mark.parametrize("layout", ["ct-nvfp4", "fp8-128", "modelopt-nvfp4", "ct-int4-asymmetric"])
def test_tied_embeddings_stay_tied(model_of, tmp_path, layout):
    row, (model, source) = stored_layouts.ROWS[layout], model_of("Llama", tied=True)
    truth = stored_layouts.write(row, model, source, tmp_path / layout)
    decoder = load(tmp_path / layout, row.format or "bf16")
    assert decoder.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight_NK in truth.items():
            model.get_parameter(name).copy_(weight_NK if row.format else weight_NK.bfloat16())
        assert rms_error(logits_of(decoder, TOKENS), model(TOKENS[None]).logits[0]) < 1e-5


@pytest.mark.parametrize("family", ["Gemma3", "Ministral3"])
def test_the_language_part_of_a_multimodal_checkpoint_keeps_its_codes(tmp_path, family):
    model = multimodal(family, **WIDE)
    source, row = save(model, tmp_path / "float"), stored_layouts.ROWS["ct-nvfp4"]
    with safe_open(source / "model.safetensors", "pt") as file:
        linears = [name.removesuffix(".weight") for name in file.keys() if "language" in name]  # noqa: SIM118
    linears = [name for name in linears if name.endswith("_proj")]
    truth = stored_layouts.write_mixed(dict.fromkeys(linears, row), row.config, source, tmp_path / "packed")
    decoder = load(tmp_path / "packed", "nvfp4")
    weights = {name: linear.weight for name, linear in decoder.linears()}
    assert len(weights) == len(linears) and {weight.name for weight in weights.values()} == {"nvfp4"}
    (stored,) = [name for name in truth if name.endswith("layers.1.mlp.up_proj.weight")]
    assert torch.equal(weights["layers.1.mlp.up_proj"].decode(), truth[stored])


@pytest.mark.parametrize("layout", ["ct-fp8-channel", "ct-int4-group"])
def test_the_line_on_quantization_names_the_layout(model_of, tmp_path, layout):
    row, (model, source) = stored_layouts.ROWS[layout], model_of("Llama")
    stored_layouts.write(row, model, source, tmp_path / layout)
    path, prompts = str(tmp_path / layout), [TOKENS.tolist()]
    line = check_quantization(load(path, "nvfp4"), path, "nvfp4", prompts)
    assert f"nvfp4 of {row.kind} in compressed-tensors's layout: KL to the float weights 0." in line
    assert check_quantization(load(path, "bf16"), path, "bf16", prompts) is None


def test_plan_says_what_is_loaded_unchanged_and_what_stays_in_bf16(model_of, tmp_path):
    model, source = model_of("Llama")
    row = stored_layouts.ROWS["ct-fp8-channel"]
    rows = dict.fromkeys([name for name in stored_layouts.linears_of(model) if "down_proj" not in name], row)
    stored_layouts.write_mixed(rows, row.config, source, tmp_path / "some")
    said = read_layout(str(tmp_path / "some"), "nvfp4")
    assert said.startswith("compressed-tensors: 24 weights in FP8 per channel, quantized again to nvfp4; 4 ")
    assert said.endswith("4 linears in full precision stay in BF16: 0.00 GB more")
    assert read_layout(str(source), "nvfp4") is None and read_layout("qwen2.5-7b", "nvfp4") is None


def test_activations_in_eight_bits_are_not_dropped_by_fp8_flow(model_of, tmp_path):
    row, (model, source) = stored_layouts.ROWS["fp8-128"], model_of("Llama")
    stored_layouts.write(row, model, source, tmp_path / "fp8")
    checkpoint = locate(str(tmp_path / "fp8")).open()
    (line,) = checkpoint_notices(checkpoint, "fp8")
    assert "fp8: quantization of activations to 8 bits is dropped; inputs" in line
    assert checkpoint_notices(checkpoint, "fp8-flow") == []
    kinds = {linear.weight.name for _, linear in load(tmp_path / "fp8", "fp8-flow").linears()}
    assert kinds == {"fp8-flow"}


@pytest.mark.parametrize("where", ["file", "producer"])
def test_modelopt_is_known_by_its_own_file_and_by_its_producer(model_of, tmp_path, where):
    row, (model, source) = stored_layouts.ROWS["modelopt-nvfp4"], model_of("Llama")
    folder = tmp_path / "modelopt"
    truth = stored_layouts.write(row, model, source, folder)
    config = json.loads((folder / "config.json").read_text())
    algorithm = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    producer = {"producer": {"name": "modelopt", "version": "0.47.0"}}
    del config["quantization_config"]
    if where == "file":
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": algorithm, **producer}))
    else:
        config["quantization_config"] = algorithm | producer
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = locate(str(folder)).open()
    name = "model.layers.1.mlp.up_proj"
    torch.testing.assert_close(checkpoint.packed(name).decode(), truth[f"{name}.weight"], rtol=2e-7, atol=0)
    (line,) = checkpoint_notices(checkpoint, "nvfp4")
    assert "quantization of activations to 4 bits and quantization of the KV cache are dropped" in line
