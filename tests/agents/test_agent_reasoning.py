"""An answer with reasoning is followed as the chat template writes it when it is sent back."""

import json

import pytest
from agent_episodes import load_tiny

from qerl.config.options import ServeOptions
from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.serve.agents.parser import EpisodeParser, OpenEpisode
from qerl.serve.agents.record import EpisodeRecord
from qerl.serve.request import RequestParser
from qerl.types import Prompt, Sample, Sampling

pytest.importorskip("starlette")
# As Qwen3's: reasoning is left out once the user has answered.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }} "
    "{% if m['reasoning_content'] and loop.index > ns.last %}"
    "<think>{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
ANSWER = '<think>\nwhy \n</think>\n\nSo.<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
ASKED = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "So.", "tool_calls": [CALL]}
REASONED = REPLY | {"reasoning_content": "why "}
RESULT, NEXT = {"role": "tool", "tool_call_id": "1", "content": "3"}, {"role": "user", "content": "on"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = load_tiny(tmp_path_factory.mktemp("model"))
    model.engine.tokenizer.chat_template = "{% set ns = namespace(last=0) %}" + TEMPLATE
    return model


def parts_of(model, *turns):
    """The parts of an episode whose requests have these messages and get ANSWER each."""
    engine, options = model.engine, ServeOptions(max_prompt_tokens=1000)
    record = EpisodeRecord(engine.tokenizer, sample_index=0)
    sampling = Sampling(max_tokens=100)
    episode = OpenEpisode(number=0, base_url="", api_key="", record=record, seed=1, sampling=sampling)
    shared = RequestParser(model=model, options=options, name="policy")
    each = {"options": options, "name": "policy", "max_calls": 9, "timeout_s": 9.0}
    parser = EpisodeParser(model=model, shared=shared, episode=episode, **each)
    tokens_T = list(engine.tokenizer(ANSWER)["input_ids"])
    text = Detokenizer(engine.tokenizer, ()).decode(tokens_T)
    tools = [{"type": "function", "function": {"name": "add"}}]
    for messages in turns:
        request = parser.chat(json.dumps({"messages": messages, "tools": tools}).encode())
        sample = Sample(
            tokens_T=tokens_T, logprobs_T=[0.0] * len(tokens_T), text=text, finish="stop", version=0
        )
        request.pending.on_choice(0, sample)
    prompt = Prompt(index=0, text="", tokens_T=[1], messages=None, columns={})
    parts = record.parts(prompt)
    for part in parts:
        (sample,) = part.samples_G
        sampled = [sample.tokens_T[i] for i in sample.sampled_indices]
        assert sampled == tokens_T * (len(sampled) // len(tokens_T))
    return parts, record


def test_a_result_of_a_tool_continues_the_sampled_tokens(model):
    (part,), _ = parts_of(model, [ASKED], [ASKED, REASONED, RESULT])
    (sample,) = part.samples_G
    between = model.engine.tokenizer.decode(sample.tokens_T[sample.environment_spans[0].start :])
    assert between.startswith("<|im_start|>tool 3<|im_end|><|im_start|>assistant <think>")
    (_,), _ = parts_of(model, [ASKED], [ASKED, REASONED | {"content": None}, RESULT])


@pytest.mark.parametrize(
    "messages",
    [[ASKED, REASONED, NEXT], [ASKED, REPLY, RESULT], [ASKED, REPLY, NEXT], [ASKED, REASONED, RESULT, NEXT]],
    ids=["left out by the template", "not sent back", "neither", "left out later"],
)
def test_reasoning_that_the_prompt_lacks_ends_a_sample(model, messages):
    (first, second), _ = parts_of(model, [ASKED], messages)
    shown = model.engine.tokenizer.decode(second.prompt.tokens_T)
    assert "why" not in shown and "So." in shown
    assert len(first.samples_G[0].tokens_T) == len(second.samples_G[0].tokens_T)


def test_a_later_answer_without_its_own_reasoning_drops_the_earlier_too(model):
    turns = [ASKED], [ASKED, REASONED, RESULT], [ASKED, REASONED, RESULT, REASONED, NEXT]
    (first, second), _ = parts_of(model, *turns)
    assert len(first.samples_G[0].environment_spans) == 1
    assert "why" not in model.engine.tokenizer.decode(second.prompt.tokens_T)


def test_malformed_calls_of_an_episode_are_counted_once_each(model, monkeypatch):
    monkeypatch.setitem(
        globals(), "ANSWER", "<think><tool_call></think><tool_call>{} <tool_call>[1]<|im_end|>"
    )
    _, record = parts_of(model, [ASKED], [NEXT])
    assert record.num_malformed_calls == 4
