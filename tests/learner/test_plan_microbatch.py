"""learn.max_tokens_per_microbatch None: how many tokens are learned from at a time."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from learner.samples import prompt, sample
from learner.tiny import run_config
from qerl.config import ModelConfig
from qerl.cost.operands import operand_cache_bytes
from qerl.learner.packing import pack
from qerl.learner.plan import memory as plan
from qerl.learner.plan.memory import MAX_TOKENS, form_of, full_rows, microbatch_rows, with_microbatches
from qerl.models.random_weights import shape
from qerl.training import planned_learner
from qerl.types import Group

PROMPT = 256


def config_of(recompute="none", micro_tokens=None):
    learn = {"gradient_checkpointing": recompute, "max_tokens_per_microbatch": micro_tokens}
    config = run_config(learn=learn, model=ModelConfig())
    sample = dataclasses.replace(config.sample, max_tokens=1024)
    return dataclasses.replace(config, sample=sample, num_prompts=16, num_generations=8)


def tokens_of(name, gpu_gb, *, recompute="none", micro_tokens=None):
    config = with_microbatches(shape(name), config_of(recompute, micro_tokens), PROMPT, gpu_gb * 1e9)
    return config.learn.max_tokens_per_microbatch


def test_a_small_model_has_larger_ones():
    found = [tokens_of(f"qwen2.5-{size}", 1000) for size in ("0.5b", "1.5b", "3b", "7b")]
    assert found == [MAX_TOKENS, 32_768, 16_384, 16_384]


@pytest.mark.parametrize(("name", "recompute"), [("qwen2.5-7b", "none"), ("qwen2.5-14b", "layer")])
def test_a_large_model_has_16_384_tokens_if_its_operands_fit_beside_them(name, recompute):
    a, config = shape(name), config_of(recompute, 16_384)
    need = plan.learning_bytes(plan.memory_parts(a, config, PROMPT, 16_384))
    need += operand_cache_bytes(a, form_of(config), config.learn)
    enough = need / plan.USABLE_SHARE / 1e9
    assert tokens_of(name, enough - 1e-3, recompute=recompute) == 8192
    assert tokens_of(name, enough + 1e-3, recompute=recompute) == 16_384
    assert tokens_of(name, 1000, recompute=recompute) == 16_384


def test_a_large_model_without_operands_has_16_384_tokens():
    config = config_of("layer")
    for model in (ModelConfig(format="bf16"), ModelConfig(format="fp8-flow")):
        plain = dataclasses.replace(config, model=model)
        found = with_microbatches(shape("qwen2.5-7b"), plain, PROMPT, 140e9)
        assert found.learn.max_tokens_per_microbatch == 16_384


@pytest.mark.parametrize("recompute", ("none", "layer"))
def test_they_are_the_largest_that_fit(recompute):
    a, all_tokens = shape("qwen2.5-1.5b"), [8192, 16_384, 32_768]
    needs = [
        plan.learning_bytes(plan.memory_parts(a, config_of(recompute, count), PROMPT, count))
        for count in all_tokens
    ]
    assert needs == sorted(needs) and needs[0] < needs[-1]
    for need, count in zip(needs, all_tokens, strict=True):
        enough = need / plan.USABLE_SHARE / 1e9
        assert tokens_of("qwen2.5-1.5b", enough + 1e-3, recompute=recompute) == count
    assert tokens_of("qwen2.5-1.5b", 0.1, recompute=recompute) == 8192


def test_a_number_that_is_given_stays():
    assert tokens_of("qwen2.5-0.5b", 1000, micro_tokens=100) == 100


@pytest.mark.parametrize("length", (40, 300))
def test_short_samples_fill_no_more_than_what_was_planned(length):
    """They fill a micro-batch better than those of the maximum length, from which the plan's rows come."""
    config = config_of(micro_tokens=16_384)
    one = sample([1] * length, logprobs_T=[0.0] * length, advantage=1.0)
    group = Group(prompt=prompt(0, [1] * PROMPT), samples_G=[one] * 8)
    batches = pack([(group, [1.0] * 8)] * 16, max_tokens=16_384, device=torch.device("cpu"))
    most = max(len(batch.tokens_T) for batch in batches)
    assert most <= full_rows(config, PROMPT) == 16_384
    assert length < 100 or most > microbatch_rows(config, PROMPT)


def test_a_size_fits_when_it_is_filled():
    """Not only with the rows that samples of the maximum length have."""
    a = shape("qwen2.5-1.5b")
    for gpu_gb in range(12, 90, 2):
        config = with_microbatches(a, config_of(), PROMPT, gpu_gb * 1e9)
        rows = config.learn.max_tokens_per_microbatch
        need = plan.learning_bytes(plan.memory_parts(a, config, PROMPT, rows))
        assert rows == 8192 or need <= plan.USABLE_SHARE * gpu_gb * 1e9


@pytest.mark.parametrize(("other_gb", "tokens", "kind"), [(10, 16_384, "layer"), (200, 32_768, "none")])
def test_a_learner_on_a_gpu_gets_what_fits_on_every_rank(other_gb, tokens, kind, monkeypatch):
    """This GPU has 90 GB; none is needed to ask."""
    lines, ranks = [], SimpleNamespace(gather=lambda own: [own, other_gb * 1e9])
    monkeypatch.setattr(plan, "usable_bytes", lambda device: 90e9)
    monkeypatch.setattr(planned_learner, "Learner", lambda decoder, config, **given: config)
    decoder = SimpleNamespace(device=torch.device("cuda"), architecture=shape("qwen2.5-1.5b"))
    asked = config_of("auto")
    learn = planned_learner.planned_learner(decoder, asked, PROMPT, notice=lines.append, ranks=ranks).learn
    assert (learn.max_tokens_per_microbatch, learn.gradient_checkpointing) == (tokens, kind)
    assert f"is {kind}: " in lines[0] and f"in micro-batches of {tokens:,} tokens" in lines[0]
