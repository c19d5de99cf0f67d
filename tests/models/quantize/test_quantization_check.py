"""Changes by quantizing are measured against the float model, and said in one line that fits the case."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.checkpoints import save_tiny
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.loader import build_decoder
from qerl.models.quantize.merge_note import NOTE, MergeNote, read_note, write_note
from qerl.models.quantize.quantization_check import check_quantization, describe, prompt_probes
from qerl.models.quantize.quantization_error import Probe, QuantizationError, quantization_error

TOKENS = [(7 * i) % 250 for i in range(3, 60)]
PROBES = [Probe(tokens_T=TOKENS[:20], start=12), Probe(tokens_T=TOKENS[20:], start=0)]
CPU = torch.device("cpu")


def decoder_of(folder, format="nvfp4"):
    checkpoint = locate(str(folder)).open()
    return build_decoder(checkpoint, format=format, compute=torch.float32, device=CPU, resident=True)


def their_logits(model):
    """Logits of the compared rows, by transformers, one sequence at a time."""
    with torch.no_grad():
        return torch.cat([model(torch.tensor([p.tokens_T])).logits[0, p.start :] for p in PROBES])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_kl_is_that_of_two_whole_models(tmp_path, family):
    save_tiny(tmp_path, family, dtype=torch.bfloat16)
    decoder = decoder_of(tmp_path)
    error = quantization_error(decoder, locate(str(tmp_path)).open(), PROBES)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    p_TV = their_logits(model).log_softmax(-1)
    for name, linear in decoder.linears():
        model.get_submodule(f"model.{name}").weight.data.copy_(linear.weight.decode())
    q_TV = their_logits(model).log_softmax(-1)
    assert error.num_tokens == len(p_TV) == 45
    torch.testing.assert_close(
        error.kl, (p_TV.exp() * (p_TV - q_TV)).sum(-1).mean().item(), rtol=1e-3, atol=0
    )
    assert error.agreement == (p_TV.argmax(-1) == q_TV.argmax(-1)).double().mean().item() < 1


def test_unquantized_weights_have_no_error(tmp_path):
    save_tiny(tmp_path, dtype=torch.bfloat16)
    error = quantization_error(decoder_of(tmp_path, "bf16"), locate(str(tmp_path)).open(), PROBES)
    assert (error.kl, error.agreement, error.weight_error) == (0.0, 1.0, 0.0)


def test_packed_and_unquantized_models_have_no_line(tmp_path):
    save_tiny(tmp_path, dtype=torch.bfloat16)
    assert check_quantization(decoder_of(tmp_path, "bf16"), str(tmp_path), "bf16", [TOKENS]) is None
    line = check_quantization(decoder_of(tmp_path), str(tmp_path), "nvfp4", [TOKENS], "a text")
    assert line.endswith(f", over {len(TOKENS)} tokens of a text") and "\n" not in line


def test_weights_on_the_grid_give_a_merged_model_away(tmp_path):
    """A change of less than a step, over weights that NVFP4 represents, is rounded away."""
    save_tiny(tmp_path, dtype=torch.float32, intermediate_size=128)
    file, rng = tmp_path / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name, linear in decoder_of(tmp_path).linears():
        change_NK = 0.004 * torch.randn(linear.weight.shape, generator=rng)
        tensors[f"model.{name}.weight"] = linear.weight.decode() + change_NK * linear.weight.decode().std()
    save_file(tensors, file, metadata={"format": "pt"})
    error = quantization_error(decoder_of(tmp_path), locate(str(tmp_path)).open(), PROBES)
    assert 0.003 < error.weight_error < 0.006
    line = describe(dataclasses.replace(error, kl=0.02), "nvfp4", None, "a text")
    assert line.startswith("warning: nvfp4") and "of values of nvfp4: if this is a merged model" in line
    assert not describe(dataclasses.replace(error, kl=0.02), "int8", None, "a text").startswith("warning")


def error_of(kl):
    return QuantizationError(kl=kl, agreement=0.9, num_tokens=9, weight_error=0.095)


def test_a_remedy_is_named_where_the_weights_moved_by_more_than_calibration_leaves():
    for kl, ends in ((0.013, "tokens of t"), (0.055, "tokens of t; calibrate"), (0.6, "advice")):
        line = describe(error_of(kl), "nvfp4", None, "t", "advice", "calibrate")
        assert line.endswith(ends), line
    assert describe(error_of(0.055), "nvfp4", None, "t", "advice").endswith("tokens of t")


def note_of(**changes):
    values = {"run": "runs/demo", "base": "b", "base_format": "nvfp4", "adapter": {"rank": 4}, "base_kl": 0.8}
    return MergeNote(**(values | {"merged_kl": 0.0, "probes": tuple(PROBES)} | changes))


def test_with_a_note_the_line_tells_what_is_kept():
    assert describe(error_of(0.009), "fp8", note_of(), "").startswith(
        "fp8 keeps 99% of what runs/demo learned"
    )
    assert describe(error_of(0.2), "nvfp4", note_of(), "").startswith("warning: nvfp4 keeps 75% of what")
    assert describe(error_of(1.2), "nvfp4", note_of(), "").startswith("warning: nvfp4 keeps 0% of what")
    assert note_of(base_kl=0.0).kept_share(0.3) == 1.0  # nothing was learned


def test_a_note_is_measured_on_its_own_tokens(tmp_path):
    save_tiny(tmp_path, dtype=torch.bfloat16)
    decoder = decoder_of(tmp_path)
    write_note(tmp_path, note_of(base_kl=1e-9))
    assert read_note(tmp_path, 320) == note_of(base_kl=1e-9)
    line = check_quantization(decoder, str(tmp_path), "nvfp4", [TOKENS[:5]])
    assert "keeps 0% of what runs/demo learned" in line and "over 45 tokens of its samples" in line
    assert "top-1 agreement" in line


@pytest.mark.parametrize(
    "damage",
    [
        {"probes": []},
        {"probes": [{"tokens_T": [400], "start": 0}]},
        {"probes": [[]]},
        {"base_kl": "x"},
        {"a": 1},
    ],
)
def test_a_damaged_note_is_refused_by_name(tmp_path, damage):
    write_note(tmp_path, note_of())
    values = json.loads((tmp_path / NOTE).read_text()) | damage
    (tmp_path / NOTE).write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"{NOTE}: is damaged"):
        read_note(tmp_path, 320)


def test_prompts_are_measured_after_what_all_begin_with():
    probes = prompt_probes([[1, 2, 3, 4], [1, 2, 5], [1, 2, 6, 7]])
    assert [(p.tokens_T, p.start) for p in probes] == [([1, 2, 3, 4], 1), ([1, 2, 5], 1), ([1, 2, 6, 7], 1)]
    assert prompt_probes([[4, 5]]) == [Probe(tokens_T=[4, 5], start=0)]
    assert prompt_probes([[4, 5], [4, 5]]) == [Probe(tokens_T=[4, 5], start=0)]
    assert prompt_probes([[4] * 2000 + [i] for i in range(3)]) == [Probe(tokens_T=[4] * 1024, start=0)]
    assert sum(len(p.tokens_T) for p in prompt_probes([[i] * 300 for i in range(9)])) == 1024


@pytest.mark.parametrize(
    "prompts",
    [[[1, 2, 3]] * 4, [[7]] * 2, [[1, 2], [1, 2]], [[*range(1024), i] for i in range(3)]],
    ids=["equal", "one token", "two", "equal up to the limit"],
)
def test_prompts_that_differ_nowhere_are_measured_once_as_a_whole(prompts):
    assert prompt_probes(prompts) == [Probe(tokens_T=prompts[0][:1024], start=0)]


def test_a_prompt_that_begins_all_others_does_not_count_twice():
    assert prompt_probes([[1, 2], [1, 2, 3], [1, 2]]) == [Probe(tokens_T=[1, 2, 3], start=1)]
