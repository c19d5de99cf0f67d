"""Messages of prompts: what the row says reaches the chat template, or the row is refused by name."""

import json

import pytest

from material import jsonl, tokenizer
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import Task
from qerl.tasks.rows.conversation import read_chat
from qerl.tasks.rows.messages import BadRow, read_messages
from qerl.tasks.rows.prompt import Renderer
from qerl.tasks.rows.table import open_rows
from qerl.trl.data import write_rows

TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}]{% endif %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}"
    "{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "[call {{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASK = {"role": "user", "content": "How warm is Oslo?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "7 degrees"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def renderer(folder, row, template=TEMPLATE, **settings):
    config, made = TaskConfig(name=jsonl(folder / "x.jsonl", [row]), **settings), tokenizer()
    made.chat_template = template
    return Renderer(config, open_rows(config)[0], made)


def text(folder, row, **settings):
    return renderer(folder, row, **settings).prompt(0, index=0).text


def refused(folder, row, **settings):
    with pytest.raises(UserError) as error:
        renderer(folder, row, **settings).prompt(0, index=0)
    return str(error.value)


def test_a_conversation_with_tools_reaches_the_template_whole(tmp_path):
    made = text(tmp_path, {"prompt": [ASK, CALLED, RESULT], "tools": TOOLS})
    assert made.startswith('[tools [{"') and '"name": "weather"' in made
    assert (
        "<user>How warm is Oslo?<assistant>[call weather Oslo]<tool weather c1>7 degrees<assistant>" in made
    )


@pytest.mark.parametrize(
    "call", [CALL, CALL["function"], {"function": {**CALL["function"], "arguments": None}}]
)
@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_a_call_may_have_any_content_and_form(tmp_path, call, content):
    made = text(tmp_path, {"prompt": [ASK, {**CALLED, "content": content, "tool_calls": [call]}, RESULT]})
    assert f"<assistant>{content or ''}[call weather" in made


@pytest.mark.parametrize(
    ("call", "tools"),
    [
        (json.dumps(CALL), json.dumps(TOOLS)),
        (json.dumps([CALL]), [json.dumps(TOOLS[0])]),
        ({"name": "weather", "parameters": {"city": "Oslo"}}, [TOOLS[0]["function"]]),
    ],
)
def test_calls_and_tools_of_a_prompt_may_be_written_as_in_a_demonstration(tmp_path, call, tools):
    row = {"prompt": [ASK, {**CALLED, "tool_calls": call}, RESULT], "tools": tools}
    demonstrated = read_chat({"messages": row["prompt"], "tools": tools})
    made = text(tmp_path, row)
    assert f"[tools {json.dumps(demonstrated.variables['tools'])}]" in made and "[call weather Oslo]" in made
    assert demonstrated.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


PART = {"type": "text", "text": "How "}


@pytest.mark.parametrize(
    "parts",
    [
        [PART, {"type": "text"}],
        [PART, {"type": "text", "text": 5}],
        [PART, {"type": "text", "text": "a", "cache_control": {}}],
        [PART, {"type": "image_url", "image_url": "x"}],
    ],
)
def test_the_same_parts_are_refused_in_prompts_demonstrations_and_rows_of_trl(tmp_path, parts):
    message = {"role": "user", "content": parts}
    with pytest.raises(BadRow, match="part"):
        read_messages([message], "prompt")
    with pytest.raises(BadRow, match="part"):
        read_chat({"messages": [message]})
    with pytest.raises(UserError, match=r"part|block"):
        write_rows("train_dataset", [{"prompt": [message]}], tmp_path)


def test_text_parts_are_joined(tmp_path):
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "warm?"}]
    assert "<user>How warm?<" in text(tmp_path, {"prompt": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize("variables", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_a_row_has_its_own_variables_of_the_template(tmp_path, variables):
    assert text(tmp_path, {"prompt": [ASK], "chat_template_kwargs": variables}).startswith("[thinking False]")


def test_each_row_is_rendered_with_its_own_tools(tmp_path):
    rows = [{"prompt": [ASK], "tools": TOOLS if i % 2 else None} for i in range(8)]
    made = tokenizer()
    made.chat_template = TEMPLATE
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", rows), num_held_out=0)
    for prompt in Task(config, made, seed=0, max_prompt_tokens=500).train_prompts(0, 8):
        assert ("[tools" in prompt.text) == (prompt.index % 2 == 1)
        assert prompt.columns["tools"] == rows[prompt.index]["tools"]  # rewards get them too


def test_empty_keys_of_a_recorded_conversation_are_left_out(tmp_path):
    recorded = {**ASK, "refusal": None, "annotations": [], "tool_calls": None, "name": None}
    assert text(tmp_path, {"prompt": [recorded]}) == text(tmp_path, {"prompt": [ASK]})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**ASK, "weight": 0}, "message 1 of prompt has 'weight', which is not used"),
        ({**ASK, "audio": {"id": "a"}}, "has 'audio'"),
        ({**ASK, "name": 3}, "name is a number, not a text"),
        ({"role": "user"}, "content is missing, not a text"),
        ({"role": "user", "content": None}, "content is missing"),
        (
            {**ASK, "content": [{"type": "image_url", "image_url": "x"}]},
            "message 1 of prompt: a part is not a text (type: 'image_url')",
        ),
        (
            {**ASK, "content": [{"type": "text", "text": "a", "cache_control": {}}]},
            "a text part has 'cache_control'",
        ),
        ({**CALLED, "tool_calls": [{"id": "c1"}]}, "a tool call has no function with a name"),
        ({**CALLED, "tool_calls": [{"name": ["f"]}]}, "a tool call has no function with a name"),
        (
            {**CALLED, "tool_calls": "weather"},
            "message 1 of prompt: the tool call is a text that is not JSON",
        ),
        (
            {**CALLED, "tool_calls": [{"name": "f", "arguments": "{"}]},
            "arguments of 'f' is a text that is not JSON",
        ),
        (
            {**CALLED, "tool_calls": [{"name": "f", "arguments": [1]}]},
            "arguments of 'f' is a list, not an object",
        ),
        ({**CALLED, "tool_calls": [{"name": "f", "arguments": '{"x": NaN}'}]}, "is a text that is not JSON"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, message, reason):
    assert reason in refused(tmp_path, {"prompt": [message]})


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"tools": "weather"}, "tools is a text that is not JSON"),
        ({"tools": [{"parameters": {}}]}, "tools is not a list of functions with names"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is a list, not an object"),
    ],
)
def test_columns_for_the_template_are_checked(tmp_path, columns, reason):
    assert reason in refused(tmp_path, {"prompt": [ASK], **columns})


def test_a_template_that_leaves_out_functions_is_refused(tmp_path):
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert "leaves out tools, such as weather" in refused(
        tmp_path, {"prompt": [ASK], "tools": TOOLS}, template=plain
    )
    assert "leaves out tool_calls" in refused(tmp_path, {"prompt": [ASK, CALLED, RESULT]}, template=plain)


@pytest.mark.parametrize("row", [{"prompt": [ASK], "tools": TOOLS}, {"prompt": [ASK, CALLED, RESULT]}])
def test_without_a_template_functions_are_refused(tmp_path, row):
    assert "needs a chat template, which the tokenizer does not have" in refused(tmp_path, row, template=None)


def test_a_variable_of_the_run_and_of_a_row_is_refused(tmp_path):
    row = {"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": True}}
    assert "has enable_thinking" in refused(
        tmp_path, row, chat_template_kwargs=json.dumps({"enable_thinking": 0})
    )
