"""Tool calls in answers, whole and in pieces of any length."""

import pytest

from qerl.errors import UserError
from qerl.serve.tools import ToolCallStream, call_schema

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CASES = [
    ("just text", "just text", []),
    ("a < b and <tool", "a < b and <tool", []),
    (HERMES, "", [("add", '{"a": 1}')]),
    (f"Let me see.\n{HERMES}", "Let me see.\n", [("add", '{"a": 1}')]),
    (f"{HERMES}\n{HERMES.replace('add', 'sub')}", "", [("add", '{"a": 1}'), ("sub", '{"a": 1}')]),
    ('{"name": "add", "parameters": {"a": "{"}}', "", [("add", '{"a": "{"}')]),
    (
        '{"name": "add", "parameters": {}}; {"name": "sub", "parameters": {}}',
        "",
        [("add", "{}"), ("sub", "{}")],
    ),
    ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (
        r'{"name": "add", "parameters": {"a": "\ud800"}}',
        r'{"name": "add", "parameters": {"a": "\ud800"}}',
        [],
    ),
    ('<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',) * 2 + ([],),
]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("text", "rest", "calls"), CASES)
def test_calls_are_found_and_the_rest_is_text(text, rest, calls, size):
    stream, out, found = ToolCallStream({"add", "sub"}, is_parallel=True), "", []
    steps = [stream.add(text[i : i + size]) for i in range(0, len(text), size)]
    for piece, more in [*steps, stream.end()]:
        out, found = out + piece, found + more
    assert (out, [(call.name, call.arguments) for call in found]) == (rest, calls)
    assert stream.num_calls == len(calls) == len({call.id for call in found})


def test_ids_of_calls_are_those_of_the_same_prompt_and_answer():
    def ids(prompt_T, text):
        stream = ToolCallStream({"add"}, is_parallel=True, prompt_T=prompt_T)
        return [call.id for call in [*stream.add(text)[1], *stream.end()[1]]]

    first = ids([1, 23], HERMES + HERMES)
    assert len(set(first)) == 2 and first == ids([1, 23], HERMES + HERMES)
    assert not set(first) & set(ids([12, 3], HERMES + HERMES))


def test_text_before_a_call_is_not_held_back():
    stream = ToolCallStream({"add"}, is_parallel=True)
    assert stream.add("one < two") == ("one < two", [])
    assert stream.add(" <tool_") == (" ", [])
    assert stream.add("box>") == ("<tool_box>", [])


def test_without_parallel_calls_the_first_is_the_only_one():
    stream = ToolCallStream({"add"}, is_parallel=False)
    _, calls = stream.add(f"{HERMES}{HERMES}")
    assert len(calls) == 1 and stream.num_calls == 1


def test_definitions_of_functions_are_one_table():
    point, number = {"$defs": {"p": {"type": "string"}}, "$ref": "#/$defs/p"}, {"type": "integer"}
    schema = call_schema([("f", point), ("g", number)])
    assert schema["$defs"] == {"p": {"type": "string"}} and len(schema["anyOf"]) == 2
    with pytest.raises(UserError, match="'p' differently"):
        call_schema([("f", point), ("g", {"$defs": {"p": number}})])


def test_a_call_has_no_arguments_that_its_schema_does_not_name():
    def arguments(**schema):
        return call_schema([("f", schema)])["properties"]["arguments"]

    named = {"a": {"type": "boolean"}}
    assert arguments(properties=named)["additionalProperties"] is False
    assert arguments(properties=named, additionalProperties=True)["additionalProperties"] is True
    assert "additionalProperties" not in arguments(properties=named, allOf=[{"required": ["b"]}])
