"""A call after a special token is read as one with the token, and its text elsewhere opens no call."""

import json
import random

import pytest
from test_token_text import load
from tokenizers import AddedToken

from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.serve.marked_text import Markers, spelled, unmarked
from qerl.serve.stream import TokenStream, marked_text
from qerl.serve.token_text import TokenBytes
from qerl.serve.tools import ToolCallStream
from qerl.tasks.call_forms.choice import FORMS, form_of
from qerl.types import Sample, TokenLogprob
from serve import parts
from serve.test_call_forms import CALLS, SCHEMAS, TEMPLATES, pieces_of, written

NAMES = sorted({*TEMPLATES} - {"glm4"})  # whose calls are the whole answer


def model_of(form, kind="byte_level"):
    """A tokenizer to which all control tokens of the form are special."""
    model = load(kind)
    tokens = [AddedToken(each, special=True, normalized=False) for each in form.controls]
    model.engine.tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    model.token_bytes = TokenBytes(model.engine.tokenizer)
    return model


def sampled(model, text, stop=()):
    tokens_T = model.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = Detokenizer(model.engine.tokenizer, stop).decode(tokens_T)
    return Sample(tokens_T=tokens_T, logprobs_T=[0.0], text=whole, finish="stop", version=0)


def parsed(form, markers, pieces):
    stream, text, found = ToolCallStream(SCHEMAS, is_parallel=True, form=form, markers=markers), "", []
    for out, calls in [*map(stream.add, pieces), stream.end()]:
        text, found = text + out, found + calls
    return text, [(call.name, json.loads(call.arguments)) for call in found], stream.num_malformed


@pytest.mark.parametrize("name", NAMES)
def test_calls_after_special_tokens_are_read_beside_text(name):
    form = form_of(TEMPLATES[name])
    model = model_of(form)
    markers = Markers.of(model.token_bytes, form.controls)
    sample = sampled(model, f"Let me see caf\u00e9.\n{written(name)}")
    text = marked_text(model, (), sample, markers)
    assert unmarked(text) == sample.text != text
    rng, whole = random.Random(name), parsed(form, markers, [text])
    assert whole == ("Let me see caf\u00e9.\n", CALLS, 0)
    for _ in range(300):
        assert parsed(form, markers, pieces_of(text, rng)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gemma", "metaspace"])
def test_a_stream_shows_markers_where_the_whole_has_them(kind):
    model = model_of(form_of("[TOOL_CALLS]"), kind)
    markers = Markers.of(model.token_bytes, ["[TOOL_CALLS]", "[ARGS]"])
    ids, rng = [*markers.texts], random.Random(kind)
    for _ in range(60):
        tokens_T = [rng.choice([rng.randrange(250), *ids]) for _ in range(rng.randint(1, 20))]
        whole = Detokenizer(model.engine.tokenizer, ()).decode(
            [t for t in tokens_T if t not in model.engine.stop_token_ids]
        )
        sample = Sample(tokens_T=tokens_T, logprobs_T=[0.0], text=whole, finish="length", version=0)
        stream = TokenStream(model, (), keeps_end=True, markers=markers)
        ended = [*[None] * (len(tokens_T) - 1), sample]
        pieces = [stream.add(TokenLogprob(t, 0.0), e)[0] for t, e in zip(tokens_T, ended, strict=True)]
        text = marked_text(model, (), sample, markers)
        assert "".join(pieces) == text and unmarked(text) == whole
        num_marks = sum(t in ids for t in tokens_T)
        assert sum(spelled(text).count(m) - whole.count(m) for m in markers.texts.values()) == num_marks


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_a_control_token_opens_no_call_where_the_token_is_special(name):
    form = form_of(TEMPLATES[name])
    markers = Markers.of(model_of(form).token_bytes, form.controls)
    quoted = f"You wrote: {written(name)}"
    assert parsed(form, markers, [quoted]) == (quoted, [], 0)
    assert parsed(form, Markers(), [quoted])[1] == CALLS


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_control_token_that_opens_no_call_is_not_in_the_text(form):
    markers = Markers.of(model_of(form).token_bytes, form.controls)
    (first, *_) = form.opens
    text = f'see {markers.mark(first)}{{"name": "other" &'
    rest, calls, num_malformed = parsed(form, markers, [text])
    assert (rest, calls, num_malformed) == (unmarked(text), [], 1)
    without = ToolCallStream({}, is_parallel=True, form=form, markers=markers)
    assert without.add(text) == (unmarked(text), [])


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    template = parts.TOOLS_TEMPLATE + "{# [TOOL_CALLS] #}"
    model = parts.load_tiny(tmp_path_factory.mktemp("model"), template=template)
    parts.add_special_tokens(model, "[TOOL_CALLS]", "[ARGS]")
    with parts.recorded(model) as post:
        yield post


TOOL = {"type": "function", "function": {"name": "add"}}
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
ANSWER = 'Let me see.[TOOL_CALLS]add[ARGS]{"a": 1}'


def test_a_call_of_special_tokens_is_in_every_kind_of_answer(post):
    whole = post(ANSWER, **ASK, logprobs=True, return_token_ids=True)
    (choice,) = whole["choices"]
    message, (call,) = choice["message"], choice["message"]["tool_calls"]
    assert message["content"] == "Let me see." and choice["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    num_tokens = len(ANSWER) - len("[TOOL_CALLS][ARGS]") + 2
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"]) == num_tokens
    assert len(choice["logprobs"]["content"]) == num_tokens
    deltas = [each["choices"][0]["delta"] for each in post(ANSWER, **ASK, stream=True)]
    assert "".join(each.get("content") or "" for each in deltas) == "Let me see."
    assert [each["tool_calls"][0]["function"] for each in deltas if "tool_calls" in each] == [
        call["function"]
    ]
    tool = {"type": "function", "name": "add"}
    output = post(ANSWER, path="/v1/responses", input="hi", tools=[tool])["output"]
    assert [each["type"] for each in output] == ["message", "function_call"]
    assert output[1]["arguments"] == '{"a": 1}'


def test_without_functions_and_in_completions_control_tokens_are_not_seen(post):
    text = 'Let me see.add{"a": 1}'
    assert post(ANSWER, messages=ASK["messages"])["choices"][0]["message"]["content"] == text
    assert post(ANSWER, path="/v1/completions", prompt="hi")["choices"][0]["text"] == text
    malformed = post("[TOOL_CALLS]other[ARGS]{}", **ASK)["choices"][0]["message"]
    assert malformed["content"] == "other{}" and "tool_calls" not in malformed


def test_malformed_calls_are_counted(post):
    def count():
        (line,) = [each for each in post.metrics().splitlines() if each.startswith("qerl_malformed_tool")]
        return int(line.split()[1])

    before, tool = count(), {"type": "function", "name": "add"}
    post("[TOOL_CALLS]other[ARGS]{}", **ASK)
    post("[TOOL_CALLS]add[ARGS]{", **ASK, stream=True)
    post("[TOOL_CALLS]add[ARGS]7", path="/v1/responses", input="hi", tools=[tool])
    post(ANSWER, **ASK)
    post("[TOOL_CALLS]add[ARGS]7", messages=ASK["messages"])
    assert count() == before + 3
