"""In exact mode a reused page has the bits that a call would compute; no page outlives its weights."""

import dataclasses

import pytest
import torch

from engine.parts import engine_of, prompts_of
from engine.schedule.test_window_pages import windowed
from models.family_rows import load, oracle, save
from parity import test_exact, test_exact_mixtures
from qerl.engine import LiveRequest
from qerl.models.peft.adapter import adapter_tensors
from qerl.types import Sampling


def answered(batch, prompt, episode):
    """The answer to a request; another request, of nobody's, runs beside it."""
    ended = {}
    for name, each, of in (("own", prompt, episode), ("other", prompts_of(11)[0], None)):
        batch.add(
            LiveRequest(
                prompt=each,
                sampling=Sampling(max_tokens=24),
                on_token=lambda _, token, sample, name=name: ended.update({name: sample}) if sample else None,
                is_learned=True,
                episode=of,
            )
        )
    while len(ended) < 2:
        batch.step()
    return ended["own"]


def two_calls(engine, kept_fraction):
    """The answers to a prompt and to one that goes on from the first answer, and the tokens reused."""
    (prompt,) = prompts_of(40)
    with engine.live_batch(200, kept_fraction) as batch:
        episode = object()
        first = answered(batch, prompt, episode)
        longer = [*prompt.tokens_T, *first.tokens_T, 7, 8, 9]
        second = answered(batch, dataclasses.replace(prompt, tokens_T=longer), episode)
        return [first, second], batch.generation.stats.reused_tokens


def told(samples):
    return [(s.tokens_T, s.logprobs_T, s.routes) for s in samples]


EXACT = {"stop_token_ids": frozenset(), "exact": True, "block_size": 8, "max_num_seqs": 16}


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (test_exact.policy, {}),
        (lambda: test_exact.policy(torch.bfloat16), {}),
        (lambda: test_exact.policy(torch.bfloat16), {"kv_cache_dtype": "fp8"}),
        (test_exact_mixtures.policy, {}),
        (lambda: test_exact_mixtures.policy("gpt-oss-20b", "bf16"), {}),
    ],
    ids=["fp32", "bf16", "fp8 keys", "mixture", "mixture with windows"],
)
def test_answers_and_routes_are_the_same_to_the_bit_with_kept_pages(policy, settings):
    with_kept, reused = two_calls(engine_of(policy(), **EXACT, **settings), 0.5)
    without, none = two_calls(engine_of(policy(), **EXACT, **settings), 0.0)
    assert told(with_kept) == told(without)
    assert none == 0 and reused == (40 + 24 - 1) // 8 * 8


def test_an_update_of_the_weights_drops_what_was_kept():
    decoder = test_exact.policy()
    engine = engine_of(decoder, **EXACT)
    before, reused = two_calls(engine, 0.5)
    with torch.no_grad():
        for name, master in adapter_tensors(decoder).items():
            if "lora_B" in name:
                master.mul_(-3)
    engine.publish(1)
    after, again = two_calls(engine, 0.5)
    assert reused == again == 56, "the second call reuses pages of the first one, which reuses none"
    assert told(after) != told(before) and told(after) == told(two_calls(engine, 0.0)[0])


@pytest.mark.parametrize("kind", ["recurrent states", "windows with pages of their own"])
def test_models_whose_pages_do_not_hold_all_of_a_sequence_keep_none(kind, tmp_path):
    if kind == "recurrent states":
        decoder = load(save(oracle("Qwen3_5"), tmp_path))
    else:
        decoder = windowed((7, None, 7))
    samples, reused = two_calls(engine_of(decoder, **EXACT | {"exact": False}), 0.5)
    assert reused == 0 and len(samples) == 2
