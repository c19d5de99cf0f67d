"""Fields that clients besides a chat send: token ids, echo, logprobs, truncation, tools, JSON schemas."""

import json

import pytest
import torch
from starlette.testclient import TestClient

from qerl.serve.tools import ToolCallStream
from serve import parts
from serve.test_app import events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 3}
PLAIN = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 3}
PAINT = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "$is_wet": {"type": "boolean"}},
        "required": ["color", "$is_wet"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": PAINT}, {"type": "function", "function": {"name": "wait"}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("model"), template=parts.TOOLS_TEMPLATE)


@pytest.fixture(scope="module")
def client(model):
    app, _ = parts.app_of(model, max_prompt_tokens=200)
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def choices(client, route, ask):
    reply = client.post(route, json=ask)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def test_token_ids_are_a_prompt(client, model):
    ids = model.engine.tokenizer("hello")["input_ids"]
    (text,) = choices(client, COMPLETIONS, PLAIN)
    (same,) = choices(client, COMPLETIONS, PLAIN | {"prompt": ids, "return_token_ids": True})
    assert same["text"] == text["text"]
    assert same["prompt_token_ids"] == ids and len(same["token_ids"]) == 8
    two = choices(client, COMPLETIONS, PLAIN | {"prompt": [ids, ids[:2]]})
    assert [each["index"] for each in two] == [0, 1] and two[0]["text"] == text["text"]
    reply = client.post(COMPLETIONS, json=PLAIN | {"prompt": [[5, 272]]})
    assert reply.status_code == 400 and "token 272" in reply.json()["error"]["message"]


def test_echo_with_logprobs_is_the_likelihood_of_the_prompt(client, model):
    """Against log softmax of a whole forward pass; the greedy token is the first of the top ones."""
    ids = model.engine.tokenizer("hello world")["input_ids"]
    ask = {"prompt": [ids], "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    (choice,) = choices(client, COMPLETIONS, PLAIN | ask)
    logprobs = choice["logprobs"]
    truth = parts.logits_of(model, ids).log_softmax(-1)
    want = truth[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-4)
    assert logprobs["token_logprobs"][-1] == pytest.approx(truth[-1].max().item(), abs=1e-4)
    best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
    assert best == pytest.approx(truth.max(-1).values.tolist(), abs=1e-4)
    assert choice["text"].startswith("hello world") and len(logprobs["tokens"]) == len(ids) + 1
    (alone,) = choices(client, COMPLETIONS, PLAIN | ask | {"max_tokens": 0})
    assert alone["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
    assert alone["text"] == "hello world"


def test_top_logprobs_are_the_most_likely_tokens_in_order(client, model):
    ask = HELLO | {"logprobs": True, "top_logprobs": 3, "return_token_ids": True}
    reply = client.post(CHAT, json=ask).json()
    (choice,) = reply["choices"]
    ids = [*reply["prompt_token_ids"], *choice["token_ids"]]
    truth = (
        parts.logits_of(model, ids).log_softmax(-1)[len(reply["prompt_token_ids"]) - 1 : -1].topk(3).values
    )
    for entry, row in zip(choice["logprobs"]["content"], truth.tolist(), strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(row, abs=1e-4)


def test_a_stream_has_the_logprobs_and_token_ids_of_the_whole_answer(client):
    ask = HELLO | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    (whole,) = choices(client, CHAT, ask)
    pieces = [piece["choices"][0] for piece in events(client.post(CHAT, json=ask | {"stream": True}))]
    content = [entry for piece in pieces for entry in (piece["logprobs"] or {}).get("content", [])]
    assert content == whole["logprobs"]["content"]
    assert [i for piece in pieces for i in piece.get("token_ids", [])] == whole["token_ids"]


def test_top_k_1_is_greedy_and_so_is_min_p_1(client):
    (greedy,) = choices(client, COMPLETIONS, PLAIN | {"temperature": 0})
    for change in ({"top_k": 1}, {"min_p": 1.0}):
        (choice,) = choices(client, COMPLETIONS, PLAIN | change)
        assert choice["text"] == greedy["text"]
    plain = choices(client, COMPLETIONS, PLAIN)
    assert choices(client, COMPLETIONS, PLAIN | {"top_k": -1, "min_p": 0}) == plain


def test_the_templates_variables_come_from_the_request(client):
    def prompt(change):
        reply = client.post(CHAT, json=HELLO | {"return_token_ids": True, "max_tokens": 1} | change)
        return reply.json()["prompt_token_ids"]

    assert len(prompt({"chat_template_kwargs": {"mood": "sad"}})) == len(prompt({})) + 3


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_follows_its_schema_and_stops_there(client, is_stream):
    ask = HELLO | {"max_tokens": 400, "stream": is_stream, "temperature": 1.5}
    schema = {"name": "paint", "schema": PAINT["parameters"], "strict": True}
    reply = client.post(CHAT, json=ask | {"response_format": {"type": "json_schema", "json_schema": schema}})
    if is_stream:
        pieces = [piece["choices"][0] for piece in events(reply)]
        text, finish = "".join(p["delta"].get("content", "") for p in pieces), pieces[-1]["finish_reason"]
    else:
        (choice,) = reply.json()["choices"]
        text, finish = choice["message"]["content"], choice["finish_reason"]
    value = json.loads(text)
    assert value["color"] in ("red", "blue") and type(value["$is_wet"]) is bool and len(value) == 2
    assert finish == "stop"


@pytest.mark.parametrize(("limit", "finish"), [(5, "length"), (6, "stop")])
def test_an_answer_that_is_complete_with_its_last_token_was_not_cut(client, limit, finish):
    """Clients that parse structured output raise an error for "length"."""
    format = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "abcd"}}}}
    (choice,) = choices(client, CHAT, HELLO | format | {"max_tokens": limit})
    assert choice["finish_reason"] == finish and choice["message"]["content"] == '"abcd"'[:limit]


def test_each_choice_follows_the_schema_beside_rows_without_one(client):
    """Rows of one batch with and without a grammar; greedy ones, too."""
    format = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["aa", "bb"]}}}}
    found = choices(client, CHAT, HELLO | format | {"n": 4, "seed": 1})
    assert {each["message"]["content"] for each in found} <= {'"aa"', '"bb"'}
    (greedy,) = choices(client, CHAT, HELLO | format | {"temperature": 0})
    assert greedy["message"]["content"] in ('"aa"', '"bb"')


def test_a_json_object_begins_as_one(client):
    (choice,) = choices(client, CHAT, HELLO | {"response_format": {"type": "json_object"}, "max_tokens": 60})
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objec"}, "objec"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "minLength": 10**12}, "schema"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "("}, "schema"),
    ],
)
def test_a_wrong_schema_is_the_clients_mistake(client, schema, said):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = client.post(CHAT, json=HELLO | {"response_format": format})
    assert error.status_code == 400 and error.json()["error"]["param"] == "response_format"
    assert said in error.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_required_call_is_a_call_of_an_offered_function(client, choice, is_stream):
    ask = HELLO | {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 400, "stream": is_stream}
    reply = client.post(CHAT, json=ask)
    if is_stream:
        pieces = [piece["choices"][0] for piece in events(reply)]
        (call,) = [call for piece in pieces for call in piece["delta"].get("tool_calls", [])]
        text, finish = "".join(p["delta"].get("content", "") for p in pieces), pieces[-1]["finish_reason"]
        assert call["index"] == 0
    else:
        ((call,), finish) = ((c := reply.json()["choices"][0])["message"]["tool_calls"], c["finish_reason"])
        text = c["message"]["content"]
    assert call["type"] == "function" and call["id"] and call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"])["color"] in ("red", "blue")
    assert finish == "tool_calls" and not text


def test_the_template_gets_the_tools_and_the_calls_before(client, model):
    calls = [{"id": "1", "type": "function", "function": {"name": "paint", "arguments": '{"color": "red"}'}}]
    messages = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    ask = HELLO | {"messages": messages, "tools": TOOLS, "return_token_ids": True, "max_tokens": 1}
    text = model.engine.tokenizer.decode(client.post(CHAT, json=ask).json()["prompt_token_ids"])
    assert text.replace("<|im_end|>", "").split("<|im_start|>")[1:] == [
        "paint,wait,",
        '{"name": "paint", "arguments": {"color": "red"}}',
        "done",
        "",
    ]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": 1e999}', "[" * 99, "no JSON"])
def test_arguments_that_are_no_plain_json_stay_text(client, arguments):
    calls = [{"id": "1", "type": "function", "function": {"name": "paint", "arguments": arguments}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    choices(client, CHAT, HELLO | {"messages": [message, *HELLO["messages"]]})


def test_a_template_without_tools_has_them_in_the_system_message(tmp_path):
    model = parts.load_tiny(tmp_path)
    calls = [{"id": "1", "type": "function", "function": {"name": "paint", "arguments": '{"color": "red"}'}}]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "paint"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "1"},
    ]
    ask = HELLO | {"messages": messages, "tools": TOOLS, "return_token_ids": True, "max_tokens": 1}
    app, _ = parts.app_of(model, max_prompt_tokens=1000)
    with TestClient(app, base_url="http://localhost") as client:
        text = model.engine.tokenizer.decode(client.post(CHAT, json=ask).json()["prompt_token_ids"])
    system, *others = text.replace("<|im_end|>", "").split("<|im_start|>")[1:]
    listed = system.split("\n")
    assert listed[0] == "Be kind." and [json.loads(line)["name"] for line in listed[3:-1]] == [
        "paint",
        "wait",
    ]
    call = '<tool_call>{"name": "paint", "arguments": {"color": "red"}}</tool_call>'
    assert others == ["paint", call, "done", ""]
    (found,) = ToolCallStream({"paint"}, is_parallel=True).add(call)[1]
    assert found.arguments == '{"color": "red"}'
