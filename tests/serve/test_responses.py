"""/v1/responses with OpenAI's client: text, calls and their results, JSON schemas, streams."""

import json

import openai
import pytest

from serve import parts
from serve.test_fields import PAINT

TOOL = {"type": "function", **PAINT}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = parts.load_tiny(tmp_path_factory.mktemp("model"), template=parts.TOOLS_TEMPLATE)
    app, _ = parts.app_of(model, max_prompt_tokens=200)
    with parts.serving(app) as address, openai.OpenAI(base_url=address, api_key="none") as client:
        yield client


def asked(client, **changes):
    given = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "extra_body": {"seed": 3}} | changes
    return client.responses.create(**given)


def test_the_text_is_that_of_a_chat(client):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, seed=3)
    response = asked(client, instructions="be")
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 12 and response.usage.input_tokens == chat.usage.prompt_tokens
    listed = asked(client, input=[{"role": "developer", "content": "be"}, messages[1]])
    assert listed.output_text == response.output_text


def test_a_stream_ends_with_the_whole_response(client):
    whole = asked(client)
    events = list(asked(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", whole.status),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_call_and_its_result_go_there_and_back(client, is_stream):
    ask = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 400}
    response = asked(client, **ask, stream=is_stream)
    if is_stream:
        events = list(response)
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        response = events[-1].response
    (call,) = response.output
    assert call.type == "function_call" and call.name == "paint" and response.status == "completed"
    assert json.loads(call.arguments)["color"] in ("red", "blue")
    assert not is_stream or done.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    after = asked(
        client, input=[{"role": "user", "content": "hello"}, call.model_dump(), result], tools=[TOOL]
    )
    assert after.output_text and after.usage.input_tokens > response.usage.input_tokens + len("paint") + 4


def test_the_text_follows_a_schema(client):
    format = {"type": "json_schema", "name": "x", "schema": PAINT["parameters"]}
    response = asked(client, text={"format": format}, max_output_tokens=400)
    assert json.loads(response.output_text)["color"] in ("red", "blue") and response.status == "completed"


def test_stored_responses_and_built_in_tools_are_refused(client):
    for wrong in ({"previous_response_id": "resp_1"}, {"tools": [{"type": "web_search"}]}, {"input": []}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            asked(client, **wrong)
