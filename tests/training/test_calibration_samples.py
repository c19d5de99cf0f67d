"""Calibration samples the prompts that its tokens ask for, in few calls."""

import itertools
import math

import pytest
import torch

import tiny_run
from qerl.config import ModelConfig, RunConfig, SampleConfig, TaskConfig
from qerl.engine.paged_engine import PagedEngine
from qerl.models.checkpoint.source import locate
from qerl.models.device import resolve_device
from qerl.training.calibrated import float_decoder
from qerl.training.calibration_cache import new_prompts
from qerl.training.calibration_samples import MAX_BATCHES, NUM_SAMPLES, sample_groups
from qerl.training.policy import load_task

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """(its training prompts in order, a function of the wanted tokens: what is sampled, prompts by call)."""
    folder = tmp_path_factory.mktemp("tiny")
    path, rows = tiny_run.write_model(folder / "model"), tiny_run.write_task(folder)
    task = TaskConfig(name=str(rows), rewards=("exact",), num_held_out=8)
    model = resolve_device(ModelConfig(path=str(path), format="nvfp4", device="cpu", dtype="fp32"))
    sample = SampleConfig(max_tokens=MAX_TOKENS)
    config = RunConfig(model=model, task=task, sample=sample, num_prompts=8)
    tokenizer, task = load_task(config)
    decoder = float_decoder(locate(str(path)).open(), torch.float32, "cpu", resident=True)
    # A quarter of the tokens stop a sample, so many end early.
    engine = PagedEngine(decoder, tokenizer, config.engine, stop_token_ids=frozenset(range(0, 272, 4)))
    generate = engine.generate

    def sample_tokens(num_wanted):
        calls = []
        engine.generate = lambda request: calls.append(len(request.prompts_P)) or generate(request)
        return sample_groups(config, engine, task, num_wanted), calls

    prompts = itertools.chain.from_iterable(new_prompts(config, task, MAX_BATCHES))
    return [prompt.tokens_T for prompt in prompts], sample_tokens


def num_tokens(groups):
    return sum(len(prompt) + sum(map(len, samples)) for prompt, samples in groups)


def test_the_first_call_has_as_many_prompts_as_the_longest_samples_would_need(sampled):
    prompts, sample_tokens = sampled
    found, calls = sample_tokens(400)
    assert calls[0] == math.ceil(400 / (len(prompts[0]) + NUM_SAMPLES * MAX_TOKENS))
    assert found.num_calls == len(calls) == 2 and calls[1] < calls[0]
    assert num_tokens(found.groups) >= 0.95 * 400 > num_tokens(found.groups[: calls[0]])
    assert found.stats.num_tokens >= sum(len(sample) for _, samples in found.groups for sample in samples)


def test_prompts_are_those_of_the_first_steps_each_once(sampled):
    prompts, sample_tokens = sampled
    groups = sample_tokens(400)[0].groups
    assert [prompt for prompt, _ in groups] == prompts[: len(groups)]
    assert all(len({*map(tuple, samples)}) == len(samples) <= NUM_SAMPLES for _, samples in groups)


def test_a_task_with_fewer_tokens_is_sampled_whole(sampled):
    prompts, sample_tokens = sampled
    assert len(sample_tokens(10**6)[0].groups) == len(prompts) == 32
