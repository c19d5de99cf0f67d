"""An adapter names the base that it was trained on; on it, exported, it computes what was trained."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from conftest import rms_error
from export.test_export import ADAPTER, exported, logits_of, qerl, run_of, save_model, theirs
from models.checkpoints import store_in_bf16, tiny, write_gguf
from qerl.models.packed_writer import write_quantized
from qerl.models.peft.adapter import merged_weight

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]


def divergence(truth_TV, other_TV):
    truth_TV, other_TV = truth_TV.log_softmax(-1), other_TV.log_softmax(-1)
    return (truth_TV.exp() * (truth_TV - other_TV)).sum(-1).mean().item()


def on_base(base, adapter, **settings):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **settings)
    return theirs(peft.PeftModel.from_pretrained(model, adapter))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "fp8", "int8"])
def test_on_the_exported_base_an_adapter_is_what_was_trained(tmp_path, format):
    _, config, decoder = run_of(tmp_path, format=format)
    truth_TV, adapter = logits_of(decoder), exported(tmp_path, config, "peft")
    is_packed = format in ("nvfp4", "mxfp4")
    base = exported(tmp_path, config, "base", dtype="bf16" if is_packed else "fp32")
    unpacked = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_packed else {}
    gap = divergence(truth_TV, on_base(config.model.path, adapter))
    assert divergence(truth_TV, on_base(base, adapter, **unpacked)) < 0.01 * gap


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_the_base_of_a_run_is_what_qerl_quantize_writes(tmp_path, format):
    _, config, _ = run_of(tmp_path, format=format)
    write_quantized(config.model.path, tmp_path / "quantized", format=format)
    base = exported(tmp_path, config, "base")
    for name in ("model.safetensors", "tokenizer.json"):
        assert (base / name).read_bytes() == (tmp_path / "quantized" / name).read_bytes(), name


IN_BF16 = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
IN_BF16 += ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.v_proj"]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_linears_that_a_checkpoint_has_in_bf16_stay_so_in_exports_of_its_runs(tmp_path, format):
    def save(folder, family):
        packed = tmp_path / "packed"
        save_model(tmp_path / "float", family)
        write_quantized(str(tmp_path / "float"), packed, format=format)
        store_in_bf16(packed, tmp_path / "float", IN_BF16)
        for name in ("model.safetensors", "config.json"):
            shutil.copyfile(packed / name, folder / name)

    _, config, decoder = run_of(tmp_path, format=format, save=save)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    base = load_file(exported(tmp_path, config, "base") / "model.safetensors")
    assert base.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(base[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
    merged = AutoModelForCausalLM.from_pretrained(
        exported(tmp_path, config, "merged", dtype="fp32"), dtype=torch.float32
    )
    assert rms_error(theirs(merged), logits_of(decoder)) < 1e-5
    four_bit = load_file(exported(tmp_path, config, format) / "model.safetensors")
    linears = dict(decoder.linears())
    for name in IN_BF16:
        weight = merged_weight(linears[name.removeprefix("model.")]).bfloat16()
        assert torch.equal(four_bit[f"{name}.weight"], weight)
    for folder in ("base", format):
        written = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        assert sorted(written["ignore"]) == sorted(["lm_head", *IN_BF16])


@pytest.mark.parametrize("layers", [None, (1,)])
def test_peft_reads_every_field_of_adapter_config_as_it_is_written(tmp_path, layers):
    _, config, _ = run_of(
        tmp_path, adapter=dataclasses.replace(ADAPTER, dropout=0.25, layers_to_transform=layers)
    )
    out = exported(tmp_path, config, "peft")
    described, read = (
        json.loads((out / "adapter_config.json").read_text()),
        peft.PeftConfig.from_pretrained(out),
    )
    assert isinstance(read, peft.LoraConfig)
    for field, value in described.items():
        got = getattr(read, field)
        assert (sorted(got) if field == "target_modules" else got) == (
            sorted(value) if field == "target_modules" else value
        ), field
    named = {"r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform", "inference_mode"}
    plain, unnamed = peft.LoraConfig(), {"task_type", "base_model_name_or_path", *named}
    assert {
        f.name for f in dataclasses.fields(read) if getattr(read, f.name) != getattr(plain, f.name)
    } <= unnamed


def commands_of(card):
    lines = [line.strip() for line in card.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("qerl ")]


def test_the_commands_of_the_card_write_the_base_and_the_last_line_names_it(tmp_path, monkeypatch, capsys):
    run, config, _ = run_of(tmp_path)
    adapter = exported(tmp_path, config, "peft")
    said = f"{config.model.path} quantized to nvfp4"
    assert f"the adapter was trained on {said}; `qerl export {run} base --as base`" in capsys.readouterr().err
    card = (adapter / "README.md").read_text()
    assert f"It was trained on {said}." in card and "--max-lora-rank 8 " in card
    written = []
    for number, command in enumerate(commands_of(card)):
        monkeypatch.chdir(tmp_path)
        (tmp_path / f"place-{number}").mkdir()
        monkeypatch.chdir(tmp_path / f"place-{number}")
        assert qerl(monkeypatch, *command[1:]) == 0
        written.append((Path("base") / "model.safetensors").read_bytes())
    assert len(written) == 2 and written[0] == written[1]


def test_a_base_that_is_stored_in_the_runs_format_is_named_as_it_is(tmp_path, capsys):
    _, config, _ = run_of(tmp_path)
    write_quantized(config.model.path, tmp_path / "packed")
    for format, path in (("bf16", config.model.path), ("nvfp4", str(tmp_path / "packed"))):
        model = dataclasses.replace(config.model, path=path, format=format)
        (tmp_path / format).mkdir()
        (tmp_path / format / "run").symlink_to(tmp_path / "run")
        adapter = exported(tmp_path / format, dataclasses.replace(config, model=model), "peft")
        assert f"It was trained on the weights of {path} as they are." in (adapter / "README.md").read_text()
        assert "trained on" not in capsys.readouterr().err


def test_a_gguf_file_is_named_as_the_base(tmp_path):
    _, config, _ = run_of(tmp_path)
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny())
    model = dataclasses.replace(config.model, path=str(file))
    card = (exported(tmp_path, dataclasses.replace(config, model=model), "peft") / "README.md").read_text()
    assert "It was trained on the weights of model.gguf quantized to nvfp4." in card
