"""longrope (Phi-3 and Phi-4 with 128k positions) within and beyond the original length."""

import json
import math

import pytest
import torch
import transformers

from engine.parts import drawn, engine_of, prompts_of
from models.family_rows import load, oracle, save
from models.tiny import logits_of
from qerl.models.checkpoint.source import locate
from qerl.models.rope import magnitude
from qerl.models.transformers_backend.backend import language_limits, transformers_config

ORIGINAL, LONGEST = 64, 256


@pytest.fixture(scope="module")
def model():
    return oracle("Phi3", sliding_window=None, original_max_position_embeddings=ORIGINAL)


def tokens_of(length):
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def test_within_the_original_length_logits_are_transformers(model, tmp_path):
    decoder = load(save(model, tmp_path))
    assert decoder.architecture.max_positions == ORIGINAL
    assert magnitude(decoder.architecture.rope) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    for length in (2, ORIGINAL):
        tokens_T = tokens_of(length)
        assert (logits_of(decoder, tokens_T) - model(tokens_T[None]).logits[0]).abs().max() < 1e-4


@torch.no_grad()
def test_one_token_more_changes_transformers_logits_of_all_before_it(model):
    """So what draws a sample that passes the original length is another policy than what scores it."""
    tokens_T = tokens_of(ORIGINAL + 1)
    within, beyond = (model(tokens_T[None, :end]).logits[0, :ORIGINAL] for end in (ORIGINAL, ORIGINAL + 1))
    assert (within - beyond).abs().amax(1)[1:].min() > 1e-2


def with_long_frequencies(folder):
    """Edit config.json as docs/models.md says."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
    rope = config[name]
    rope["short_factor"] = rope["long_factor"]
    rope["attention_factor"] = math.sqrt(1 + math.log(longest / original) / math.log(original))
    rope["original_max_position_embeddings"] = config["original_max_position_embeddings"] = longest
    path.write_text(json.dumps(config))
    return folder


@torch.no_grad()
def test_the_edited_config_gives_every_sequence_the_long_frequencies(model, tmp_path):
    decoder = load(with_long_frequencies(save(model, tmp_path)))
    assert decoder.architecture.max_positions == LONGEST
    edited = transformers.Phi3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for length in (5, ORIGINAL + 1, 200):
        tokens_T = tokens_of(length)
        logits_TV = logits_of(decoder, tokens_T)
        assert (logits_TV - edited(tokens_T[None]).logits[0]).abs().max() < 1e-4
        if length > ORIGINAL:
            assert (logits_TV - model(tokens_T[None]).logits[0]).abs().max() < 1e-4


@torch.no_grad()
def test_a_sample_that_passes_the_original_length_has_transformers_logprobs(model, tmp_path):
    decoder = load(with_long_frequencies(save(model, tmp_path)))
    prompts_P = prompts_of(60)
    (sample,) = drawn(engine_of(decoder, stop_token_ids=frozenset()), prompts_P, num_samples=1, max_tokens=30)
    logits_TV = model(torch.tensor([prompts_P[0].tokens_T + sample.tokens_T])).logits[0, 59:-1]
    truth_T = logits_TV.log_softmax(-1)[range(30), sample.tokens_T]
    assert (torch.tensor(sample.logprobs_T) - truth_T).abs().max() < 1e-4


def test_the_transformers_backend_keeps_to_the_original_length(model, tmp_path):
    source = locate(str(save(model, tmp_path)))
    assert language_limits(transformers_config(source))[0] == ORIGINAL
    with_long_frequencies(tmp_path)
    assert language_limits(transformers_config(source))[0] == LONGEST
