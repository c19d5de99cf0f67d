import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.checkpoint.test_tokenizer import folder_with_tokenizer
from models.checkpoints import byte_tokens, save_tiny, tiny, write_gguf
from qerl.errors import RunError, UserError
from qerl.formats import FORMATS, NVFP4
from qerl.models.checkpoint.layouts.compressed_tensors import WRITTEN
from qerl.models.checkpoint.notices import checkpoint_notices
from qerl.models.checkpoint.safetensors_file import SafetensorsFolder
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import linear_groups, tensor_shapes
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.families import from_hf_config
from qerl.models.packed_writer import write_quantized

WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}


def quantized_tiny(tmp_path, family="llama", *, format="nvfp4", **changes):
    model = save_tiny(tmp_path / "float", family, **changes)
    write_quantized(str(tmp_path / "float"), tmp_path / "packed", format=format)
    return model, SafetensorsFolder(tmp_path / "packed")


def refusal(*args, **options):
    with pytest.raises(UserError) as caught:
        write_quantized(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_linear_is_written_as_its_encoding_and_the_rest_as_it_was(tmp_path, family, format):
    model, packed = quantized_tiny(tmp_path, family, format=format)
    quantized = locate(str(tmp_path / "packed")).open()
    truth = model.state_dict()
    for group in linear_groups(from_hf_config(packed.config)):
        together = FORMATS[format].encode(torch.cat([truth.pop(f"{linear}.weight") for linear in group]))
        read = [quantized.packed(linear) for linear in group]
        assert torch.equal(torch.cat([weight.decode() for weight in read]), together.decode())
    assert all(torch.equal(packed.read(name), value) for name, value in truth.items())
    assert quantized.shapes == tensor_shapes(from_hf_config(packed.config))


def test_linears_that_are_fused_elsewhere_share_their_global_scale(tmp_path):
    _, packed = quantized_tiny(tmp_path)
    scales = {n: packed.read(n).item() for n in packed.shapes if n.endswith("weight_global_scale")}
    layer = {n.split(".")[-2]: scale for n, scale in scales.items() if ".1." in n}
    assert layer["q_proj"] == layer["k_proj"] == layer["v_proj"] != layer["o_proj"]
    assert layer["gate_proj"] == layer["up_proj"] != layer["down_proj"]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_transformers_decompresses_it_to_the_same_weights(tmp_path, family, tied, format):
    _, packed = quantized_tiny(tmp_path, family, format=format, tie_word_embeddings=tied)
    quantized = locate(str(tmp_path / "packed")).open()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    model(torch.tensor([[1, 2, 3]]))  # the first forward decompresses
    for group in linear_groups(from_hf_config(packed.config)):
        for linear in group:
            theirs = model.get_submodule(linear).weight.float()
            ours = quantized.packed(linear).decode()
            # compressed-tensors decompresses in bfloat16, with two roundings: of s / g and of q * s / g
            torch.testing.assert_close(theirs, ours, rtol=2**-7, atol=0)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_config_is_one_that_compressed_tensors_accepts(tmp_path, format):
    _, packed = quantized_tiny(tmp_path, format=format)
    config = QuantizationConfig.model_validate(packed.config["quantization_config"])
    scheme = config.config_groups["group_0"]
    assert config.format == scheme.format == WRITTEN[format].checkpoint_format
    group_size = {"nvfp4": 16, "mxfp4": 32}[format]
    assert (scheme.weights.num_bits, scheme.weights.group_size) == (4, group_size)
    assert scheme.input_activations is None and config.ignore == ["lm_head"]
    with safe_open(tmp_path / "packed" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers 4 refuses a file without it
    float_config = json.loads((tmp_path / "float" / "config.json").read_text())
    assert {k: v for k, v in packed.config.items() if k != "quantization_config"} == float_config


def test_shards_hold_what_one_file_holds(tmp_path):
    _, whole = quantized_tiny(tmp_path)
    write_quantized(str(tmp_path / "float"), tmp_path / "shards", shard_bytes=30_000)
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    biggest = max(tensor.nbytes for tensor in map(whole.read, whole.shapes))
    assert all(file.stat().st_size < max(biggest, 30_000) + 4000 for file in shards)
    parts = SafetensorsFolder(tmp_path / "shards")
    assert parts.shapes == whole.shapes
    for name in whole.shapes:
        assert torch.equal(parts.read(name).view(torch.uint8), whole.read(name).view(torch.uint8))
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(whole.read(name).nbytes for name in whole.shapes)
    AutoModelForCausalLM.from_pretrained(tmp_path / "shards")


def test_a_tied_head_is_not_written_twice(tmp_path):
    _, packed = quantized_tiny(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in packed.shapes and "model.embed_tokens.weight" in packed.shapes


def test_the_tokenizer_and_the_generation_config_come_along(tmp_path):
    folder = folder_with_tokenizer(tmp_path / "float")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (folder / "pytorch_model.bin").touch()
    write_quantized(str(folder), tmp_path / "packed")
    assert AutoTokenizer.from_pretrained(tmp_path / "packed")("ab").input_ids == [1, 2]
    assert (tmp_path / "packed" / "generation_config.json").read_text() == '{"eos_token_id": [0, 2]}'
    assert not (tmp_path / "packed" / "pytorch_model.bin").exists()


def test_a_gguf_becomes_a_folder_that_transformers_loads(tmp_path):
    model = tiny(dtype=torch.bfloat16)
    write_gguf(tmp_path / "m.gguf", model, vocabulary={"tokens": byte_tokens()})
    write_quantized(str(tmp_path / "m.gguf"), tmp_path / "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    stored = SafetensorsFolder(tmp_path / "packed")
    assert stored.read("model.embed_tokens.weight").dtype == torch.bfloat16
    assert (stored.config["bos_token_id"], stored.config["eos_token_id"]) == (0, 1)
    assert loaded.generation_config.eos_token_id == [1]
    ours, theirs = (
        load_tokenizer(str(tmp_path / "m.gguf")),
        AutoTokenizer.from_pretrained(tmp_path / "packed"),
    )
    config = json.loads((tmp_path / "packed" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    text = "<|im_start|>hello 123<|im_end|>"
    assert ours(text).input_ids == theirs(text).input_ids and ours.chat_template == theirs.chat_template


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    save_tiny(tmp_path / "float")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "note").touch()
    assert "is not an empty folder" in refusal(str(tmp_path / "float"), tmp_path / "packed")
    assert [f.name for f in (tmp_path / "packed").iterdir()] == ["note"]
    assert "is not an empty folder" in refusal(str(tmp_path / "float"), tmp_path / "packed" / "note")


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "packed").mkdir()
    quantized_tiny(tmp_path)
    assert (tmp_path / "packed" / "config.json").exists()


def test_a_failure_leaves_nothing_behind(tmp_path):
    save_tiny(tmp_path / "float", intermediate_size=72)
    said = refusal(str(tmp_path / "float"), tmp_path / "packed")
    name, shape = "model.layers.0.mlp.down_proj.weight", "[64, 72]"
    assert f"{name}: nvfp4: K must be a multiple of 16, got a weight of shape {shape}" in said
    assert [f.name for f in tmp_path.iterdir()] == ["float"]


def test_everyone_may_read_what_is_written(tmp_path):
    quantized_tiny(tmp_path)
    modes = {file.stat().st_mode & 0o444 for file in [tmp_path / "packed", *(tmp_path / "packed").iterdir()]}
    assert modes == {0o444}


def test_a_disk_that_refuses_is_the_run_s_error(tmp_path, monkeypatch):
    save_tiny(tmp_path / "float")
    monkeypatch.setattr(
        "qerl.models.hf_writer.save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(RunError, match="packed: cannot be written: full"):
        write_quantized(str(tmp_path / "float"), tmp_path / "packed")
    assert [f.name for f in tmp_path.iterdir()] == ["float"]


@pytest.mark.parametrize("format", ["int8", "nf4", "nonsense"])
def test_a_format_without_a_layout_is_refused(tmp_path, format):
    said = refusal("anything", tmp_path / "packed", format=format)
    assert said == f"{format} cannot be written to a checkpoint; supported: nvfp4 and mxfp4"


def test_a_checkpoint_that_is_packed_is_not_packed_again(tmp_path):
    quantized_tiny(tmp_path)
    assert "is quantized already" in refusal(str(tmp_path / "packed"), tmp_path / "again")


def with_quantization(folder, quantization):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return locate(str(folder))


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "aqlm"}, "is quantized with aqlm, which is not supported; supported are"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"g": {}}},
            "compressed-tensors marlin-24; supported are",
        ),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "has no config_groups"),
        ({}, "with None"),
        ("fp8", "quantization_config must be an object, is 'fp8'"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, quantization, says):
    save_tiny(tmp_path)
    with pytest.raises(UserError, match=says):
        with_quantization(tmp_path, quantization).open()


@pytest.mark.parametrize(
    ("key", "value"), [("num_bits", 8), ("group_size", 32), ("symmetric", False), ("type", "int")]
)
def test_weights_in_other_blocks_than_the_format_s_are_refused(tmp_path, key, value):
    save_tiny(tmp_path)
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": WEIGHTS | {key: value}}},
    }
    with pytest.raises(UserError, match=f"nvfp4-pack-quantized needs {key} .*, got {value}"):
        with_quantization(tmp_path, quantization).open()


def test_the_codes_of_a_checkpoint_are_taken_as_they_are(tmp_path):
    model, _ = quantized_tiny(tmp_path)
    name = "model.layers.0.mlp.down_proj"
    weight, truth = (
        locate(str(tmp_path / "packed")).open().packed(name),
        NVFP4.encode(model.state_dict()[f"{name}.weight"]),
    )
    for field, tensor in truth.tensors().items():
        assert torch.equal(weight.tensors()[field].view(torch.uint8), tensor.view(torch.uint8)), field


def test_dropped_quantization_of_activations_is_said(tmp_path):
    quantized_tiny(tmp_path)
    quantization = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]

    def notices(activations):
        quantization["config_groups"]["group_0"]["input_activations"] = activations
        return checkpoint_notices(with_quantization(tmp_path / "packed", quantization).open(), "nvfp4")

    assert notices(None) == []
    (line,) = notices({"num_bits": 4, "type": "float"})
    assert line.startswith(f"{tmp_path / 'packed'}: quantization of activations to 4 bits is dropped")


def test_codes_that_do_not_fit_the_format_are_quantized_again_and_this_is_said(tmp_path):
    quantized_tiny(tmp_path)
    (line,) = checkpoint_notices(locate(str(tmp_path / "packed")).open(), "int8")
    says = "compressed-tensors weights in NVFP4 are decoded and quantized again to int8"
    assert line == f"{tmp_path / 'packed'}: {says} (--model.format nvfp4 loads them as they are)"
