"""Answers under a grammar are learned from as the choice among what the grammar allowed."""

import dataclasses

import pytest
import torch
from agent_episodes import CHATML, load_tiny, playing

import tiny_run
from qerl.config import LearnConfig, ModelConfig, NoiseConfig, RunConfig
from qerl.learner import Learner
from qerl.learner.forward import DecoderForward
from qerl.learner.packing import pack
from qerl.models.peft.adapter import adapter_tensors, publish
from qerl.models.transformers_backend.transformers_model import TransformersModel
from qerl.serve.loaded_model import load_model
from qerl.training.rollouts.rollout import agent_metrics, learned_parts

pytest.importorskip("starlette")
pytest.importorskip("openai")
pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"is_big": {"type": "boolean"}, "n": {"enum": ["one", "two"]}},
    "required": ["is_big", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("model"))


async def structured(client, row):
    """A free answer, one in JSON that continues it, and a forced call with a history of its own."""

    async def ask(messages, **options):
        return (
            (await client.chat.completions.create(model="m", messages=messages, **options)).choices[0].message
        )

    messages = [{"role": "user", "content": "hello"}]
    messages += [(await ask(messages, max_tokens=5)).to_dict(), {"role": "user", "content": "as JSON"}]
    await ask(messages, response_format=FORMAT)
    await ask([{"role": "user", "content": "call"}], tools=[TOOL], tool_choice="required")
    return 1.0


@pytest.fixture(scope="module")
def groups(model):
    with playing(model, structured) as play:
        return play({}, num_samples=4, max_tokens=100)


def lesson(groups):
    """The groups that are learned from; the first samples have been better than the others."""
    parts = [part for group in groups for part in learned_parts(group)]
    for part in parts:
        part.samples_G[:] = [
            dataclasses.replace(s, advantage=1.0 - 2.0 * (i % 2)) for i, s in enumerate(part.samples_G)
        ]
    return parts


def learned(model, parts):
    """The metrics of a step, which leaves the model as it was."""
    learn = LearnConfig(max_tokens_per_microbatch=500)
    config = RunConfig(noise=NoiseConfig(schedule="none"), learn=learn, num_steps=2)
    decoder = model.engine._model
    before = {name: master.detach().clone() for name, master in adapter_tensors(decoder).items()}
    metrics = Learner(decoder, config).step(parts)
    for name, master in adapter_tensors(decoder).items():
        master.data.copy_(before[name])
    publish(decoder)
    return metrics


def test_each_sampled_token_keeps_what_was_allowed_in_its_place(groups, model):
    for sample in groups[0].samples_G:
        spoken, called = (part.samples_G[0] for part in sample.episode.parts)
        free, restricted = spoken.allowed.set_C[:5], spoken.allowed.set_C[5:]
        assert set(free) == {None} and None not in restricted
        for s in (spoken, called):
            tokens_C = [s.tokens_T[i] for i in s.sampled_indices]
            assert len(s.allowed.set_C) == len(tokens_C) == len(s.logprobs_T)
            for token, index, logprob in zip(tokens_C, s.allowed.set_C, s.logprobs_T, strict=True):
                if index is not None:
                    bits = int.from_bytes(s.allowed.sets[index], "little")
                    assert bits >> token & 1
                    assert (logprob == 0.0) == (bits.bit_count() == 1)
        assert len(spoken.allowed.sets) < len(restricted)  # a set that recurs is kept once


def test_learner_and_sampler_agree_on_tokens_under_a_grammar(groups, model):
    metrics = learned(model, lesson(groups))
    assert metrics["mismatch_kl"] < 1e-9 and metrics["mismatch_max"] < 1e-4
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["capped_fraction"] < 0.6
    assert metrics["importance_weight_mean"] == pytest.approx(1.0, abs=1e-4)


def test_without_the_grammar_the_learner_would_correct_for_another_policy(groups, model):
    parts = lesson(groups)
    for part in parts:
        part.samples_G[:] = [dataclasses.replace(s, allowed=None) for s in part.samples_G]
    metrics = learned(model, parts)
    assert metrics["mismatch_kl"] > 1.0 and metrics["importance_weight_mean"] < 0.5


def test_the_gradient_is_that_of_the_choice_among_the_allowed(groups, model):
    """By finite differences of the whole answer's masked logprob along the update's direction."""
    decoder, parts = model.engine._model, lesson(groups)
    config = RunConfig(noise=NoiseConfig(schedule="none"))
    batches = pack([(p, [1.0] * len(p.samples_G)) for p in parts], max_tokens=9999, device=decoder.device)
    forward, masters = DecoderForward(decoder, config), list(adapter_tensors(decoder).values())

    def total():
        return torch.cat([forward(batch)[0] for batch in batches]).sum()

    for master in masters:
        master.grad = None
    total().backward()
    grads = [master.grad.clone() for master in masters if master.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads).item()
    values = []
    for step in (1e-2, -1e-2):
        before = [master.detach().clone() for master in masters]
        for master, grad in zip(masters, grads, strict=True):
            master.data += step / norm * grad
        publish(decoder)
        with torch.no_grad():
            values.append(total().item())
        for master, value in zip(masters, before, strict=True):
            master.data.copy_(value)
            master.grad = None
        publish(decoder)
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(norm, rel=0.02)


@pytest.fixture(scope="module")
def transformers_model(tmp_path_factory):
    """The same model, run by transformers' code."""
    folder = tiny_run.write_model(tmp_path_factory.mktemp("transformers"), max_positions=2048)
    (folder / "chat_template.jinja").write_text(CHATML)
    given = ModelConfig(path=str(folder), dtype="fp32", backend="transformers")
    return load_model(str(folder), None, given, with_adapter=True)


def test_a_model_of_transformers_learns_the_choice_among_the_allowed_too(transformers_model):
    assert isinstance(transformers_model.engine._model, TransformersModel)
    with playing(transformers_model, structured) as play:
        groups = play({}, num_samples=2, max_tokens=60)
    assert [sample.failure for sample in groups[0].samples_G] == [None, None]
    parts = lesson(groups)
    samples = [sample for part in parts for sample in part.samples_G]
    assert sum(index is not None for s in samples for index in s.allowed.set_C) > 60
    metrics = learned(transformers_model, parts)
    assert metrics["mismatch_max"] < 1e-4 and metrics["grad_norm"] > 0
    for part in parts:
        part.samples_G[:] = [dataclasses.replace(s, allowed=None) for s in part.samples_G]
    assert learned(transformers_model, parts)["mismatch_max"] > 1.0


def test_restricted_tokens_are_counted(groups):
    (group,) = groups
    samples = [dataclasses.replace(s, reward=1.0) for s in group.samples_G]
    counted = agent_metrics(samples)["restricted_tokens"]
    want = sum(
        index is not None
        for s in samples
        for part in s.episode.parts
        for index in part.samples_G[0].allowed.set_C
    )
    assert counted == want > 100
