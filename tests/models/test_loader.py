import json
import os
import subprocess
import sys

import gguf
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from conftest import rms_error
from models.checkpoints import save_tiny, tiny, write_gguf
from qerl.errors import UserError
from qerl.formats import BF16, FORMATS, NVFP4
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.checkpoint.source import BUILT_IN, locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.loader import build_decoder
from qerl.models.packed.packed_linear import PackedNVFP4, tiles_of
from qerl.models.packed_writer import write_quantized

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def load(path, *, format="bf16", compute=torch.float32, resident=False):
    cpu = torch.device("cpu")
    return build_decoder(
        locate(str(path)).open(), format=format, compute=compute, device=cpu, resident=resident
    )


def attend(layer_index, q_TNH, k_TKH, v_TKH, options):
    group = q_TNH.shape[1] // k_TKH.shape[1]
    k_TNH, v_TNH = k_TKH.repeat_interleave(group, 1), v_TKH.repeat_interleave(group, 1)
    q, k, v = (x.transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@torch.no_grad()
def logits_of(decoder):
    return decoder.logits(decoder(TOKENS, torch.arange(len(TOKENS)), attend))


@torch.no_grad()
def transformers_logits(model):
    return model(TOKENS[None]).logits[0]


def refusal(path, **options):
    with pytest.raises(UserError) as caught:
        load(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(folder, **changes):
    """Change the tensors of a folder's one file: None deletes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def reconfigure(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_go_into_tiles_where_their_kernels_run(tmp_path, monkeypatch):
    save_tiny(tmp_path, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4)
    plain = load(tmp_path, format="nvfp4", compute=torch.bfloat16)
    monkeypatch.setattr("qerl.models.device.has_tile_kernels", lambda device: True)
    tiled = load(tmp_path, format="nvfp4", compute=torch.bfloat16)
    kinds = [
        {type(linear.weight) for _, linear in decoder.linears()}
        for decoder in (plain, tiled, load(tmp_path, format="nvfp4"), load(tmp_path, compute=torch.bfloat16))
    ]
    assert kinds == [{NVFP4}, {PackedNVFP4}, {NVFP4}, {BF16}]
    assert tiles_of(tiled.layers[0].mlp.gate_up_projs).rows is UnpackRows.GATE_UP
    assert len(tiles_of(tiled.layers[1].self_attn.qkv_projs).widths) == 3
    assert torch.equal(logits_of(plain), logits_of(tiled))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_transformers(tmp_path, family, tied):
    model = save_tiny(tmp_path, family, dtype=torch.bfloat16, tie_word_embeddings=tied)
    assert rms_error(logits_of(load(tmp_path)), transformers_logits(model.float())) < 1e-6


def test_biases_of_a_llama_are_loaded(tmp_path):
    model = save_tiny(tmp_path, dtype=torch.bfloat16, attention_bias=True, mlp_bias=True)
    assert rms_error(logits_of(load(tmp_path)), transformers_logits(model.float())) < 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_loads_as_the_folder_it_was_made_from(tmp_path, family, tied):
    model = save_tiny(tmp_path / "folder", family, dtype=torch.bfloat16, tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", model)
    for format in ("bf16", "nvfp4"):
        ours, theirs = (load(tmp_path / name, format=format) for name in ("m.gguf", "folder"))
        assert torch.equal(logits_of(ours), logits_of(theirs))


@pytest.mark.parametrize("format", FORMATS)
def test_every_linear_holds_the_encoding_of_its_weight_and_nothing_else_is_quantized(tmp_path, format):
    truth = save_tiny(tmp_path, "qwen2", intermediate_size=128).state_dict()
    decoder = load(tmp_path, format=format, compute=torch.bfloat16)
    assert len(list(decoder.linears())) == 14
    for name, linear in decoder.linears():
        expected = FORMATS[format].encode(truth[f"model.{name}.weight"]).decode()
        if format == "nvfp4":  # as if it were one weight with those that multiply the same input
            together = [truth[f"model.{other}.weight"] for other in siblings(name)]
            expected = FORMATS[format].encode(torch.cat([truth[f"model.{name}.weight"], *together])).decode()
        assert torch.equal(linear.weight.decode(), expected[: linear.out_width])
    truth = {name: value for name, value in truth.items() if "_proj.weight" not in name}
    for name, value in truth.items():
        buffer = decoder.get_buffer(name.removeprefix("model."))
        expected = value if name.endswith("norm.weight") else value.bfloat16()
        assert torch.equal(buffer, expected) and buffer.dtype == expected.dtype


def siblings(name):
    layer, _, last = name.rpartition(".")
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    return [f"{layer}.{other}" for group in groups if last in group for other in group]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_model_quantized_when_loaded_is_the_one_that_is_written(tmp_path, format):
    folder = packed(tmp_path, "qwen2", format=format)
    loaded, read = load(tmp_path / "float", format=format), load(folder, format=format)
    for (name, one), (_, other) in zip(loaded.linears(), read.linears(), strict=True):
        for field, tensor in one.weight.tensors().items():
            assert torch.equal(tensor.view(torch.uint8), other.weight.tensors()[field].view(torch.uint8)), (
                name
            )
    assert torch.equal(logits_of(loaded), logits_of(read))


def test_resident_operands_are_the_packed_ones(tmp_path):
    save_tiny(tmp_path)
    resident, packed = (load(tmp_path, format="nvfp4", resident=resident) for resident in (True, False))
    assert torch.equal(logits_of(resident), logits_of(packed))
    assert resident.num_bytes > packed.num_bytes


def test_shards_and_their_order_do_not_matter(tmp_path):
    truth = logits_of(load(save_and_return(tmp_path / "one")))
    save_tiny(tmp_path / "many", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "many", max_shard_size="20KB"
    )
    (tmp_path / "many" / "model.safetensors").unlink()
    assert torch.equal(logits_of(load(tmp_path / "many")), truth)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    turned = dict(zip(shards, reversed(shards), strict=True))
    for shard in shards:  # the first file becomes the last
        (tmp_path / "many" / shard).rename(tmp_path / "many" / f"{turned[shard]}.new")
    for shard in shards:
        (tmp_path / "many" / f"{shard}.new").rename(tmp_path / "many" / shard)
    index["weight_map"] = {name: turned[shard] for name, shard in reversed(index["weight_map"].items())}
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(load(tmp_path / "many")), truth)


def save_and_return(folder, *args, **changes):
    save_tiny(folder, *args, **({"dtype": torch.bfloat16} | changes))
    return folder


def test_a_tied_head_that_is_present_must_be_the_embedding(tmp_path):
    save_and_return(tmp_path, tie_word_embeddings=True)
    truth = logits_of(load(tmp_path))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": embedding.clone()})
    assert torch.equal(logits_of(load(tmp_path)), truth)
    rewrite(tmp_path, **{"lm_head.weight": embedding + 1})
    assert "tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight differ" in refusal(
        tmp_path
    )


def test_old_checkpoints_rotary_frequencies_are_passed_over(tmp_path):
    save_and_return(tmp_path)
    rewrite(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(tmp_path)


DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({DOWN: None}, f"has no tensor {DOWN}"),
        ({DOWN: None, NORM: None}, f"has no tensor {NORM} (and 1 more)"),
        ({DOWN: torch.zeros(96, 64)}, f"{DOWN} is [96, 64], must be [64, 96]"),
        ({DOWN: torch.zeros(64, 96, dtype=torch.int32)}, f"{DOWN} is int32, must be a float"),
        ({DOWN: torch.zeros(64, 96).to(torch.float8_e4m3fn)}, f"{DOWN} is float8_e4m3fn, must be a float"),
        ({DOWN: torch.full((64, 96), float("nan"))}, f"{DOWN} holds NaN or infinity"),
        ({NORM: torch.full((64,), float("inf"))}, f"{NORM} holds NaN or infinity"),
        (
            {"model.layers.2.mlp.up_proj.weight": torch.zeros(2)},
            "unexpected tensor model.layers.2.mlp.up_proj",
        ),
        ({"model.layers.0.self_attn.q_proj.qweight": torch.zeros(2)}, "unexpected tensor"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(tmp_path, changes, says):
    save_and_return(tmp_path)
    rewrite(tmp_path, **changes)
    assert f"{tmp_path}: {says}" in refusal(tmp_path)


def test_a_weight_that_does_not_fit_the_format_is_named(tmp_path):
    save_and_return(tmp_path, intermediate_size=72)
    said = refusal(tmp_path, format="nvfp4")
    assert said.startswith(
        f"{tmp_path}: model.layers.0.mlp.down_proj.weight: nvfp4: K must be a multiple of 16"
    )


def test_a_truncated_file_is_named_before_anything_is_loaded(tmp_path):
    file = save_and_return(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file}: truncated: " in refusal(tmp_path)


def test_another_architecture_is_refused_by_name(tmp_path):
    reconfigure(save_and_return(tmp_path), architectures=["GemmaForCausalLM"])
    assert f"{tmp_path}: architecture GemmaForCausalLM is not supported" in refusal(tmp_path)


@pytest.mark.parametrize("method", ["aqlm", "quip", "hqq"])
def test_a_checkpoint_in_another_quantization_is_refused_by_name(tmp_path, method):
    reconfigure(save_and_return(tmp_path), quantization_config={"quant_method": method})
    assert f"is quantized with {method}" in refusal(tmp_path)


def packed(tmp_path, family="llama", *, format="nvfp4", **changes):
    save_tiny(tmp_path / "float", family, **({"dtype": torch.bfloat16} | changes))
    write_quantized(str(tmp_path / "float"), tmp_path / "packed", format=format)
    return tmp_path / "packed"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_a_packed_checkpoint_computes_what_transformers_computes_from_it(tmp_path, family, tied, format):
    folder = packed(tmp_path, family, format=format, tie_word_embeddings=tied)
    decoder, model = load(folder, format=format), tiny(family, tie_word_embeddings=tied)
    packed_model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = transformers_logits(packed_model)  # the first forward decompresses the weights
    model.load_state_dict(packed_model.state_dict(), strict=False)
    with torch.no_grad():
        for name, linear in decoder.linears():
            model.get_submodule(f"model.{name}").weight.copy_(linear.weight.decode())
    truth = transformers_logits(model)
    assert rms_error(logits_of(decoder), truth) < 1e-6
    ours = logits_of(load(folder, format=format, compute=torch.bfloat16))
    assert rms_error(ours, truth) < 1.1 * rms_error(theirs, truth) < 0.03


def test_what_a_packed_checkpoint_leaves_unpacked_stays_precise(tmp_path):
    folder = packed(tmp_path)
    name = "model.layers.1.mlp.down_proj"
    original = load_file(tmp_path / "float" / "model.safetensors")[f"{name}.weight"]
    gone = dict.fromkeys([f"{name}.weight_{part}" for part in ("packed", "scale", "global_scale")])
    rewrite(folder, **gone, **{f"{name}.weight": original})
    weight = load(folder, format="nvfp4").layers[1].mlp.down_proj.weight
    assert isinstance(weight, BF16) and torch.equal(weight.weight, original)


def test_a_packed_head_is_unpacked(tmp_path):
    folder = packed(tmp_path)
    head = FORMATS["nvfp4"].encode(load_file(folder / "model.safetensors")["lm_head.weight"])
    tensors = {
        "lm_head.weight": None,
        "lm_head.weight_packed": head.codes,
        "lm_head.weight_scale": head.scales,
    }
    rewrite(folder, **tensors, **{"lm_head.weight_global_scale": head.global_scale})
    assert torch.equal(load(folder, format="nvfp4").lm_head.weight, head.decode())


def test_the_scales_of_activations_are_passed_over(tmp_path):
    folder = packed(tmp_path)
    rewrite(folder, **{"model.layers.0.mlp.up_proj.input_global_scale": torch.ones(1)})
    load(folder, format="nvfp4")


def test_a_packed_checkpoint_is_quantized_again_to_another_format(tmp_path):
    folder = packed(tmp_path)
    weights = [load(folder, format=format).layers[1].mlp.down_proj.weight for format in ("nvfp4", "int8")]
    truth = FORMATS["int8"].encode(weights[0].decode())
    assert torch.equal(weights[1].codes, truth.codes) and torch.equal(weights[1].scales, truth.scales)


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{UP}_scale": None}, f"has no tensor {UP}_scale"),
        ({f"{UP}_packed": None}, f"has no tensor {UP}"),
        ({f"{UP}_packed": torch.zeros(96, 64, dtype=torch.uint8)}, f"{UP} is [96, 128], must be [96, 64]"),
        ({f"{UP}_scale": torch.zeros(96, 5)}, f"{UP}_scale is [96, 5], must be [96, 4]"),
        ({f"{UP}_packed": torch.zeros(96, 32)}, f"{UP}_packed must be torch.uint8, is torch.float32"),
        ({f"{UP}_scale": torch.zeros(96, 4)}, f"{UP}_scale must be torch.float8_e4m3fn, is torch.float32"),
        ({f"{UP}_global_scale": torch.tensor([float("inf")])}, f"{UP}_global_scale holds NaN or infinity"),
        ({f"{UP}_global_scale": torch.zeros(1)}, f"{UP}_global_scale must be positive"),
    ],
)
def test_packed_tensors_that_make_no_sense_are_named(tmp_path, changes, says):
    folder = packed(tmp_path)
    rewrite(folder, **changes)
    assert f"{folder}: {says}" in refusal(folder, format="nvfp4")


def test_a_scale_that_means_nan_is_refused(tmp_path):
    folder = packed(tmp_path, format="mxfp4")
    scales = load_file(folder / "model.safetensors")[f"{UP}_scale"]
    rewrite(folder, **{f"{UP}_scale": scales.index_fill(0, torch.tensor([3]), 255)})
    assert f"{UP}_scale holds NaN or infinity" in refusal(folder, format="mxfp4")


PEAKS = """
import sys, torch
from pathlib import Path
from qerl.models.loader import build_decoder
from qerl.models.checkpoint.source import locate

def load(path):
    cpu = torch.device("cpu")
    checkpoint = locate(path).open()
    return build_decoder(checkpoint, format="nvfp4", compute=torch.bfloat16, device=cpu, resident=False)

def resident_bytes(which):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if which in line)
    return int(line.split()[1]) * 1024

load(sys.argv[1])
for path in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = resident_bytes("VmRSS")
    decoder = load(path)
    print(resident_bytes("VmHWM") - before, decoder.num_bytes)
    del decoder
"""


def test_the_peak_is_the_quantized_model_and_one_tensor(tmp_path):
    """38 million weights: 76 MB in bfloat16, 21 MB in NVFP4; the largest tensor is 19 MB."""
    size = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**size, num_attention_heads=24, num_key_value_heads=24, head_dim=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60MB")
    write_gguf(tmp_path / "big.gguf", model, kinds={"_proj": gguf.GGMLQuantizationType.BF16})
    write_quantized(str(tmp_path / "shards"), tmp_path / "packed")
    del model
    save_tiny(tmp_path / "small")  # what the process takes once and keeps
    largest = 2 * 1536 * 6144
    tensor_bytes = {"small": 0, "shards": largest, "big.gguf": 2 * largest, "packed": largest // 4}
    command = [sys.executable, "-c", PEAKS, *(str(tmp_path / name) for name in tensor_bytes)]
    # What the C library keeps of freed tensors under its limit of 32 MB is not what is measured.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    temporaries = 12_000_000  # of encoding, whatever the size of the tensor
    for line, (name, one_tensor) in zip(out.splitlines(), tensor_bytes.items(), strict=True):
        peak, model_bytes = map(int, line.split())
        assert model_bytes < 22_000_000
        assert peak < model_bytes + one_tensor + temporaries, name


def test_the_built_in_model_knows_the_capital_of_france():
    decoder = load(BUILT_IN, format="int8")
    tokenizer = load_tokenizer(BUILT_IN)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = torch.tensor(tokenizer(text + "The capital of France is").input_ids)
    with torch.no_grad():
        hidden = decoder(tokens, torch.arange(len(tokens)), attend)
        assert tokenizer.decode(decoder.logits(hidden[-1:]).argmax()) == " Paris"
