"""Exports of families whose checkpoints have names of their own: transformers and PEFT load them."""

import dataclasses
import json
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from conftest import rms_error
from export.test_export import ADAPTER, BF16_ERROR, decoder_of, exported, peft_adapter, refusal, run_of
from models.family_rows import multimodal, oracle
from models.tiny import logits_of
from qerl.config import AdapterConfig
from qerl.cost.weights import num_trained_weights
from qerl.learner import checkpoint
from qerl.models.peft.adapter import adapter_tensors, add_adapter, load_adapter
from qerl.models.peft.peft_reader import adapter_config, read_adapter
from qerl.models.peft.peft_selection import layer_of

TOKENS_T = torch.arange(3, 40) * 7 % 250
# q, k and v in one tensor, norms that multiply by 1 + weight, gate and up in one, the same with other names
# and q and k whose sizes differ by layer, some without v
FAMILIES = ("Phi3", "Gemma2", "Glm4", "GraniteMoeHybrid", "Gemma4")
PARTS = (*FAMILIES, "a part of Gemma3", "a part of Gemma4", "a part of Ministral3")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def save(folder, family):
    make = multimodal if family.startswith("a part of ") else oracle
    make(family.removeprefix("a part of "), vocab_size=272).bfloat16().save_pretrained(folder)


def made(folder, family, **changes):
    return run_of(folder, family, save=save, **({"format": "bf16"} | changes))


@torch.no_grad()
def theirs(model):
    return model(TOKENS_T[None]).logits[0].float()


def loaded(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **settings)


@pytest.mark.parametrize("family", PARTS)
def test_merged_in_fp32_has_our_logits(tmp_path, family):
    _, config, decoder = made(tmp_path, family)
    out = exported(tmp_path, config, "merged", dtype="fp32")
    model, found = loaded(out, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    torch.testing.assert_close(theirs(model), logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)
    assert (out / "chat_template.jinja").is_file()


@pytest.mark.parametrize("family", PARTS)
def test_peft_loads_the_adapter_with_our_logits(tmp_path, family):
    _, config, decoder = made(tmp_path, family)
    auto = AutoModelForImageTextToText if family.startswith("a part of ") else AutoModelForCausalLM
    base = auto.from_pretrained(config.model.path, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, exported(tmp_path, config, "peft"))
    torch.testing.assert_close(theirs(model), logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert rms_error(theirs(model), logits_of(decoder, TOKENS_T)) > 0.02


@pytest.mark.parametrize("family", PARTS)
def test_an_exported_adapter_is_read_again_bit_for_bit(tmp_path, family):
    _, config, decoder = made(tmp_path, family)
    out = str(exported(tmp_path, config, "peft"))
    again = adapter_config(out)
    assert (again.rank, again.alpha) == (4, 8.0) and set(again.target_modules) == set(ADAPTER.target_modules)
    other = decoder_of(config)
    add_adapter(other, ADAPTER, seed=5)
    load_adapter(other, read_adapter(out, ADAPTER))
    for name, master in adapter_tensors(decoder).items():
        assert torch.equal(adapter_tensors(other)[name], master), name


@pytest.mark.parametrize("targets", [("q_proj", "v_proj", "up_proj"), ("k_proj", "down_proj")])
def test_an_adapter_of_some_of_the_linears_that_are_stored_as_one(tmp_path, targets):
    adapter = AdapterConfig(rank=4, alpha=8.0, target_modules=targets)
    _, config, decoder = made(tmp_path, "Phi3", adapter=adapter)
    base = loaded(config.model.path, dtype=torch.float32)
    out = exported(tmp_path, config, "peft")
    model = peft.PeftModel.from_pretrained(base, out)
    torch.testing.assert_close(theirs(model), logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)
    other = decoder_of(config)
    add_adapter(other, adapter, seed=5)
    load_adapter(other, checkpoint.latest_adapter(tmp_path / "run" / "checkpoints"))
    for name, master in adapter_tensors(decoder).items():
        assert torch.equal(adapter_tensors(other)[name], master), name


@pytest.mark.parametrize("family", ("Qwen2", "Phi3", "Qwen3_5", "a part of Gemma3"))
def test_an_adapter_of_some_layers_is_that_of_peft(tmp_path, family):
    adapter = dataclasses.replace(ADAPTER, layers_to_transform=(1, 3))
    _, config, decoder = made(tmp_path, family, adapter=adapter)
    auto = AutoModelForImageTextToText if family.startswith("a part of ") else AutoModelForCausalLM
    base = auto.from_pretrained(config.model.path, dtype=torch.float32, attn_implementation="eager")
    out = exported(tmp_path, config, "peft")
    model = peft.PeftModel.from_pretrained(base, out)
    torch.testing.assert_close(theirs(model), logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)
    adapted = {layer_of(name) for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    assert adapted == {1, 3}
    again = adapter_config(str(out))
    assert (again.layers_to_transform, again.rank, again.alpha) == ((1, 3), 4, 8.0)
    other = decoder_of(config)
    add_adapter(other, again, seed=5)
    load_adapter(other, read_adapter(str(out), again))
    torch.testing.assert_close(logits_of(other, TOKENS_T), logits_of(decoder, TOKENS_T))
    trained = sum(master.numel() for master in adapter_tensors(decoder).values())
    assert num_trained_weights(decoder.architecture, adapter) == trained


def test_an_adapter_that_peft_trained_on_linears_stored_as_one(tmp_path):
    _, config, _ = made(tmp_path, "Phi3")
    settings = {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
    model = peft_adapter(tmp_path / "adapter", config.model.path, **settings)
    decoder = decoder_of(config)
    add_adapter(decoder, ADAPTER, seed=0)
    load_adapter(decoder, read_adapter(str(tmp_path / "adapter"), ADAPTER))
    torch.testing.assert_close(logits_of(decoder, TOKENS_T), theirs(model), rtol=1e-4, atol=1e-4)
    some = AdapterConfig(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj"))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": {"qkv_proj": 7}}))
    said = refusal(lambda: read_adapter(str(tmp_path / "adapter"), some))
    assert "rank_pattern and alpha_pattern must give the other ranks of linears stored as one" in said


@pytest.mark.parametrize("family", ("Phi3", "Gemma2", "GraniteMoeHybrid", "a part of Gemma3"))
def test_the_4_bit_export_has_transformers_names_and_our_logits(tmp_path, family):
    _, config, decoder = made(tmp_path, family, format="nvfp4")
    out = exported(tmp_path, config, "nvfp4")
    ours = decoder_of(config_at(config, out))
    packed = loaded(out, dtype=torch.bfloat16)
    theirs(packed)  # decompresses
    plain = loaded(exported(tmp_path, config, "merged"), dtype=torch.float32)
    assert not plain.load_state_dict(packed.state_dict(), strict=False).missing_keys
    assert rms_error(theirs(plain), logits_of(ours, TOKENS_T)) < BF16_ERROR
    assert rms_error(logits_of(ours, TOKENS_T), logits_of(decoder, TOKENS_T)) < 0.5
    with safe_open(out / "model.safetensors", "pt") as file:
        names = {name.split(".")[-2] for name in file.keys() if name.endswith("weight_packed")}  # noqa: SIM118
    assert ("qkv_proj" in names) == (family == "Phi3")


@pytest.mark.parametrize("form", ["merged", "nvfp4"])
def test_norms_that_multiply_by_1_plus_weight_are_exported_bit_for_bit(tmp_path, form):
    _, config, _ = made(tmp_path, "Gemma2", format="nvfp4" if form == "nvfp4" else "bf16")
    written, stored = load_folder(exported(tmp_path, config, form)), load_folder(config.model.path)
    norms = [name for name in stored if name.endswith("norm.weight")]
    assert len(norms) == 4 * 4 + 1
    for name in norms:
        assert torch.equal(written[name], stored[name]), name


def load_folder(folder):
    return load_file(Path(folder) / "model.safetensors")


def config_at(config, path):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(path)))
