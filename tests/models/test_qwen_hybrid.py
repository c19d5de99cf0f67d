"""Qwen3.5 and dense Qwen3-Next: what is loaded of a checkpoint, what is refused, noise and checkpointing."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.family_rows import ROWS, SHAPE, adapted, load, oracle, packed, randomize, sampled_logprobs, save
from models.tiny import forest, logits_of
from qerl.aqn.norm_noise import noised
from qerl.errors import UserError
from qerl.learner.activation_checkpointing import RECOMPUTE
from qerl.models.checkpoint.notices import skipped_notices
from qerl.models.checkpoint.source import locate
from qerl.models.families import from_hf_config
from qerl.models.peft.adapter import adapter_tensors

TOKENS_T = torch.arange(40) * 7 % 61
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def config():
    return oracle("Qwen3_5").config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}


def test_of_a_multimodal_checkpoint_the_language_part_is_loaded(tmp_path):
    text = {key: value for key, value in (SHAPE | ROWS["Qwen3_5"]).items() if key != "tie_word_embeddings"}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    model = randomize(transformers.Qwen3_5ForConditionalGeneration(config).eval().requires_grad_(False))
    save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    num_vision = sum("visual" in name for name in tensors)
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoder = load(tmp_path)
    assert decoder.architecture.family == "Qwen3_5ForCausalLM" and num_vision > 0
    (notice,) = skipped_notices(locate(str(tmp_path)).open())
    assert f"{num_vision + 1} tensors of other modalities and of multi-token prediction" in notice
    theirs_TV = model(input_ids=TOKENS_T[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder, TOKENS_T), theirs_TV, atol=1e-4, rtol=0)


def test_layers_that_predict_several_tokens_are_left_out_of_a_text_model_too(tmp_path):
    save(oracle("Qwen3Next"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"mtp.norm.weight": torch.ones(48)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).architecture.family == "Qwen3NextForCausalLM"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types must be"),
        ({"layer_types": ["linear_attention"] * 4}, "must have a full_attention layer"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types must be a list of 4"),
        ({"linear_num_value_heads": 3}, "multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be a positive integer"),
        ({"linear_key_head_dim": "8"}, "linear_key_head_dim must be a positive integer"),
        ({"architectures": ["Qwen3NextForCausalLM"], "num_experts": 512}, "num_experts must be 0, got 512"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "num_experts must be 0"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
    ],
)
def test_a_wrong_entry_is_refused_in_one_line(config, change, words):
    with pytest.raises(UserError) as error:
        from_hf_config(config | change)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_without_layer_types_every_fourth_layer_attends(config):
    entries = config | {"layer_types": None, "num_hidden_layers": 8}
    assert from_hf_config(entries).layers_with("attention") == (3, 7)
    entries = json.loads(json.dumps(entries | {"full_attention_interval": 2}))
    assert from_hf_config(entries).layers_with("attention") == (1, 3, 5, 7)


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next"])
def test_noise_finds_both_norms_of_every_layer_and_not_the_gated_ones(tmp_path, family):
    decoder = load(save(oracle(family), tmp_path))
    quiet = logits_of(decoder, TOKENS_T)
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=1):
        noisy = {name for name, buffer in decoder.named_buffers() if name.endswith("noise") and buffer.any()}
        loud = logits_of(decoder, TOKENS_T)
    names = ("input_layernorm", "post_attention_layernorm")
    assert noisy == {f"layers.{i}.{name}.noise" for i in range(4) for name in names}
    assert (loud - quiet).abs().max() > 0.1 and torch.equal(logits_of(decoder, TOKENS_T), quiet)


@pytest.mark.parametrize("mode", ["layer", "offload"])
def test_activation_checkpointing_changes_no_bit_of_a_gradient(tmp_path, mode):
    decoder = adapted(load(save(oracle("Qwen3_5"), tmp_path)))
    masters, trees = list(adapter_tensors(decoder).values()), forest((11, (9, 0, 14)))
    tokens_T = torch.arange(34) * 5 % 61
    plain = torch.autograd.grad(sampled_logprobs(decoder, tokens_T, trees).sum(), masters)
    run_layer = RECOMPUTE[mode](torch.device("cpu"))()
    again = torch.autograd.grad(sampled_logprobs(decoder, tokens_T, trees, run_layer).sum(), masters)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_pass_that_knows_no_states_is_stopped(tmp_path):
    decoder = load(save(oracle("Qwen3_5"), tmp_path))
    positions_T, attend = packed(forest((40, ())))
    with pytest.raises(AssertionError, match="no function for recurrent states"):
        decoder(TOKENS_T, positions_T, attend)
