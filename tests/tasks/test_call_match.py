"""The reward `calls`: what equals what, in which forms calls are read, and how much a part is worth."""

import json

import pytest

from qerl.config import TaskConfig
from qerl.tasks.call_match import called, calls, match, right

AREA = [{"area": {"base": [10], "height": [5.5, 5], "unit": ["square cm", ""]}}]
TWO = [{"area": {"base": [1, 2]}}, {"area": {"base": [1]}}]


def reward(sample, answer, tools=None):
    (value,) = calls(TaskConfig())(completions=[sample], answer=[answer], tools=[tools])
    return value


def written(*pairs):
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in pairs
    )


@pytest.mark.parametrize(
    "sample",
    [
        written(("area", {"base": 10, "height": 5.5, "unit": "Square-CM"})),
        "I call it.\n" + written(("area", {"height": 5, "base": 10.0})),
        '[TOOL_CALLS][{"name": "area", "arguments": {"base": 10, "height": 5}}]',
        "<tool_call>\n<function=area>\n<parameter=base>\n10\n</parameter>\n<parameter=height>\n5\n</parameter>"
        "\n</function>\n</tool_call>",
        '{"name": "area", "parameters": {"base": 10, "height": 5}}',
        "[area(base=10, height=5.5)]",
        "```python\narea(base=10, height=5, unit='square cm')\n```",
    ],
)
def test_a_right_call_in_any_form_earns_one(sample):
    assert reward(sample, AREA) == 1.0


@pytest.mark.parametrize(
    ("sample", "value"),
    [
        ("The area is 55.", 0.0),
        ("", 0.0),
        (written(("perimeter", {"base": 10, "height": 5})), 0.0),
        (written(("area", {"base": 10, "height": 6})), 2 * 2 / 6),
        (written(("area", {"base": 10})), 2 * 2 / 5),
        (written(("area", {"base": 10, "height": 5, "colour": "red"})), 2 * 3 / 7),
        (written(("area", {"base": 10, "height": 5, "unit": "inches"})), 2 * 3 / 7),
        (written(*[("area", {"base": 10, "height": 5})] * 2), 2 * 3 / 9),
        ("[area(10, 5)]", 0.0),
    ],
)
def test_a_part_of_a_call_earns_a_part(sample, value):
    assert reward(sample, AREA) == pytest.approx(value)


def test_parallel_calls_count_in_any_order_and_each_once():
    assert reward(written(("area", {"base": 2}), ("area", {"base": 1})), TWO) == 1.0
    assert reward(written(("area", {"base": 1}), ("area", {"base": 2})), TWO) == 1.0  # the first takes either
    assert 0 < reward(written(("area", {"base": 2}), ("area", {"base": 2})), TWO) < 1


def test_where_no_call_is_right_none_is():
    assert reward("I cannot.", []) == 1.0 and reward(written(("area", {})), []) == 0.0


@pytest.mark.parametrize(
    ("value", "allowed", "is_right"),
    [
        (5, [5.0], True),
        (True, [1], False),
        (1, [True], False),
        ("5", [5], False),
        ("New York, NY", ["new york NY"], True),
        ([1, 2], [[1, 2], [3]], True),
        ([2, 1], [[1, 2]], False),
        (["A b"], [["ab"]], True),
        ({"min": 3}, [{"min": [3, 4], "max": [9, ""]}], True),
        ({"min": 3, "max": 8}, [{"min": [3], "max": [9, ""]}], False),
        ({}, [{"min": [3]}], False),
        ([{"x": 1}], [[{"x": [1]}]], True),
        (None, ["", None], True),
    ],
)
def test_values_are_compared_by_structure(value, allowed, is_right):
    assert (match([("f", {"a": value})], [("f", {"a": allowed})]) == 1.0) == is_right


def test_a_dot_in_a_name_may_be_written_as_a_low_line():
    answer = [{"math.factorial": {"number": [5]}}]
    assert reward(written(("math_factorial", {"number": 5})), answer) == 1.0
    assert reward("math.factorial(number=5)", answer) == 1.0


def test_the_calls_of_a_conversation_are_those_of_its_messages():
    call = {"type": "function", "function": {"name": "area", "arguments": '{"base": 1}'}}
    assert called([{"role": "assistant", "content": "", "tool_calls": [call]}], None) == [
        ("area", {"base": 1})
    ]
    turn = {"role": "assistant", "content": written(("area", {"base": 1}))}
    assert called([turn], None) == [("area", {"base": 1})]
    replied = [turn, {"role": "tool", "content": "[g()]"}, {"role": "assistant", "content": "It is 1."}]
    assert called(replied, None) == [("area", {"base": 1})]


def test_a_number_stays_text_where_the_functions_schema_says_so():
    xml = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}]
    assert called(xml, tools) == [("f", {"a": "5"})] and called(xml, None) == [("f", {"a": 5})]
    assert called(xml, json.dumps(tools)) == [("f", {"a": "5"})]  # as the chat template's tools may be


@pytest.mark.parametrize("answer", ["?", {"f": {}}, [{"f": {}, "g": {}}], [{"f": {"a": 1}}], None, [["f"]]])
def test_an_answer_that_is_no_list_of_calls_is_an_error(answer):
    with pytest.raises(ValueError, match="the answer"):
        right(answer)
