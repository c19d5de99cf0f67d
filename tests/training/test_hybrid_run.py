"""A run of a model with recurrent states: killed and resumed, and exported to what transformers loads."""

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import tiny_run
from conftest import rms_error
from models.family_rows import randomize
from models.tiny import logits_of
from qerl.config.options import ExportOptions
from qerl.config.stored import read_config_file
from qerl.export import export
from qerl.export.write import load_fp32_policy
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.peft.adapter import merged_weight
from training.test_session import metrics

TARGETS = ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "down_proj")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# peft 0.21 with transformers 5.23
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tiny_run.write_files(tmp_path_factory.mktemp("hybrid"))
    config = transformers.Qwen3_5TextConfig(
        vocab_size=272, max_position_embeddings=128, tie_word_embeddings=False, **SHAPE
    )
    model = transformers.Qwen3_5ForCausalLM(config).requires_grad_(False)
    randomize(model).save_pretrained(folder)
    return folder


def arguments(files, out):
    more = ("--num-steps", "3", "--checkpoint.every", "1", "--learn.gradient-checkpointing", "layer")
    more = (*more, "--noise.noise-in", "both")
    targets = ("--adapter.target-modules", *TARGETS)
    return ["train", "demo_long", *tiny_run.options(files, out), *more, *targets]


def finish(files, out):
    process = tiny_run.started(*tiny_run.QERL, *arguments(files, out))
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    return out


@pytest.fixture(scope="module")
def run(files):
    return finish(files, files / "run")


def adapter(out):
    return load_file(out / "checkpoints" / "step-000003" / "adapter_model.safetensors")


def test_a_run_learns_in_every_layer_and_goes_on_after_a_kill_as_if_nothing_had_been(files, run):
    lines = metrics(run)
    assert len(lines) == 3 and all(0 <= line["reward"] <= 1 for line in lines)
    # B begins at zero: what is not zero has learned
    learned = [name for name, tensor in adapter(run).items() if "lora_B" in name and tensor.any()]
    assert len(learned) == 2 * 4 + 2 + 3, "q, o once; four of each delta layer; down of each layer"
    assert max(line["mismatch_max"] for line in lines) < 1e-2, "sampler and learner compute the same"
    again = files / "killed"
    tiny_run.kill_in_step(1, *arguments(files, again))
    assert metrics(again) == lines[:1]
    finish(files, again)
    assert metrics(again) == lines
    ours, theirs = adapter(again), adapter(run)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


TOKENS_T = torch.arange(3, 60) * 7 % 250


@pytest.fixture(scope="module")
def policy(run):
    config = read_config_file(run / "run.json")
    return config, load_fp32_policy(run, config, torch.device("cpu"))


def exported(run, config, form, **options):
    out = run.parent / form
    export(config, ExportOptions(run=run, out=out, form=form, **options))
    return out


@torch.no_grad()
def theirs(model):
    return model.eval()(TOKENS_T[None]).logits[0].float()


def test_a_merged_model_has_our_logits_in_transformers(run, policy):
    config, decoder = policy
    out = exported(run, config, "merged", dtype="fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    torch.testing.assert_close(theirs(model), logits_of(decoder, TOKENS_T), rtol=1e-4, atol=1e-4)


def test_peft_loads_the_adapter_with_our_logits(run, policy):
    config, decoder = policy
    base = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    with torch.no_grad():
        for name, linear in decoder.linears():
            base.get_submodule(f"model.{name}").weight.copy_(linear.weight.decode())
    model = peft.PeftModel.from_pretrained(base, exported(run, config, "peft"))
    ours = logits_of(decoder, TOKENS_T)
    torch.testing.assert_close(theirs(model), ours, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert rms_error(theirs(model), ours) > 1e-3


def test_a_merged_model_in_4_bits_is_read_again(run, policy):
    config, decoder = policy
    out = exported(run, config, "nvfp4")
    again = build_decoder(
        locate(str(out)).open(),
        format="nvfp4",
        compute=torch.float32,
        device=torch.device("cpu"),
        resident=False,
    )
    assert again.architecture == decoder.architecture
    linears = dict(decoder.linears())
    for name, linear in again.linears():
        # Codes are chosen for outputs; weights of another linear or layout would be off by 1.4.
        assert rms_error(linear.weight.decode(), merged_weight(linears[name])) < 0.5, name
    buffers = dict(decoder.named_buffers())
    for name, buffer in again.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=2.0**-8, atol=2.0**-8, msg=name)
