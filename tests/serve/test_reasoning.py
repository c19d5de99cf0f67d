"""Reasoning is apart from the text, whole and in pieces; a call in it is none."""

import json
import random
import typing

import pytest
from test_control_tokens import model_of

from qerl.serve.marked_text import Markers
from qerl.serve.reasoning import THINK, AnswerStream, reasoning_of
from qerl.serve.tools import ToolCallStream
from qerl.tasks.call_forms.choice import FORMS, form_of
from serve import parts
from serve.test_call_forms import CALLS, SCHEMAS, TEMPLATES, pieces_of, written

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
ADD = [("add", {})]
THINKING = [  # (prompt's end, answer, reasoning, text, calls)
    ("", f"<think>\nI {CALL}\n</think>\n\n{CALL}", f"I {CALL}", "", ADD),
    ("<think>\n", f"a\n\nb\n</think>\n\nDone. {CALL}", "a\n\nb", "Done. ", ADD),
    ("<think>", f"<think>a</think>{CALL}", "a", "", ADD),
    ("<think>\n\n</think>\n\n", f"Done </think> {CALL}", "", "Done </think> ", ADD),
    ("", f"Tags such as <think> and </think>. {CALL}", "", "Tags such as <think> and </think>. ", ADD),
    ("", f"\n <think>{CALL}", CALL, "", []),
    ("<think>", f"cut {CALL} </thin", f"cut {CALL} </thin", "", []),
    ("", "<think>\n\n</think>\n\nYes.\n", "", "Yes.\n", []),
    ("", '{"name": "add", "arguments": {}}', "", "", ADD),
    ("", "<think>x</think>\n" + '{"name": "add", "arguments": {}}', "x", "", ADD),
    ("", " <thin", "", " <thin", []),
    ("", "", "", "", []),
]
CHANNEL, START, MESSAGE, END = "<|channel|>", "<|start|>assistant", "<|message|>", "<|end|>"
TO_ADD = f"{CHANNEL}commentary to=functions.add <|constrain|>json{MESSAGE}{{}}"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
HARMONY = [
    (
        f"{ANALYSIS}I commentary to=functions.add{{}}{END}{START}{TO_ADD}",
        "I commentary to=functions.add{}",
        "",
        ADD,
    ),
    (f"{ANALYSIS}a{END}{START}{FINAL}Yes.", "a", "Yes.", []),
    (f"{ANALYSIS}a{END}{START}{ANALYSIS}b{END}{START}{FINAL}Yes.", "a\nb", "Yes.", []),
    (f" to=functions.add{CHANNEL}commentary json{MESSAGE}{{}}", "", "", ADD),
    (f"{CHANNEL}commentary{MESSAGE}I look.{END}{START}{TO_ADD}", "", "I look.", ADD),
    (f"{TO_ADD}<|call|>{START}{TO_ADD}", "", "", ADD * 2),
    (f"{ANALYSIS}cut", "cut", "", []),
    (f"{ANALYSIS}a{END}{START}{CHANNEL}fin", "a", "", []),
    ("No channel at all", "", "No channel at all", []),
    ("x" * 400, "", "x" * 400, []),
    (f"{FINAL}Say {END}{FINAL}more", "", "Say \nmore", []),
]


def parsed(reasoning, form, markers, prompt, pieces):
    calls = ToolCallStream(SCHEMAS, is_parallel=True, form=form, markers=markers)
    stream = AnswerStream(reasoning.splitter(markers, prompt), calls)
    found = [*map(stream.add, pieces), stream.end()]
    made = [(call.name, json.loads(call.arguments)) for each in found for call in each.calls]
    return "".join(each.reasoning for each in found), "".join(each.text for each in found), made


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(("prompt", "answer", "reasoning", "text", "calls"), THINKING)
def test_what_is_between_the_tags_is_reasoning(prompt, answer, reasoning, text, calls, is_special):
    form = form_of("")
    markers = Markers({1: "<think>", 2: "</think>"} if is_special else {})
    answer = markers.mark(answer)
    for tag in markers.texts.values():
        text = text.replace(tag, "")
    rng, whole = random.Random(3), parsed(THINK, form, markers, prompt, [answer])
    assert whole == (reasoning, text, calls)
    for _ in range(200):
        assert parsed(THINK, form, markers, prompt, pieces_of(answer, rng)) == whole


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(("answer", "reasoning", "text", "calls"), HARMONY)
def test_the_analysis_channel_is_reasoning(answer, reasoning, text, calls, is_special):
    form, harmony = form_of(TEMPLATES["harmony"]), reasoning_of("<|channel|>")
    controls = (*form.controls, *harmony.controls)
    markers = Markers(dict(enumerate(dict.fromkeys(controls))) if is_special else {})
    answer = markers.mark(answer)
    whole = parsed(harmony, form, markers, "", [answer])
    assert whole == (reasoning, text, calls)
    rng = random.Random(3)
    for _ in range(200):
        assert parsed(harmony, form, markers, "", pieces_of(answer, rng)) == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_random_pieces_with_reasoning_give_what_the_whole_gives(name):
    rng, form = random.Random(name), form_of(TEMPLATES[name])
    reasoning = reasoning_of("<|channel|>" if name == "harmony" else "</think>")
    markers = Markers.of(model_of(form).token_bytes, (*form.controls, *reasoning.controls))
    calls = markers.mark(written(name))
    if name == "harmony":
        texts = (f"{markers.mark(ANALYSIS)}I see {calls[:9]}{markers.mark(END)}{calls}", calls, calls[:-40])
    else:
        texts = (f"<think>{calls}</think>\n{calls}", "\n<think>a", f"<think>\n\n</think>\n\n{calls} ok")
    for text in texts:
        whole = parsed(reasoning, form, markers, "", [text])
        for _ in range(340):
            assert parsed(reasoning, form, markers, "", pieces_of(text, rng)) == whole
    assert parsed(reasoning, form, markers, "", [texts[0]])[2] == CALLS


def test_the_template_chooses_and_a_name_comes_before_it():
    assert reasoning_of("{{ '<think>' }}x{{ '</think>' }}") is THINK is reasoning_of("", "think")
    assert reasoning_of("plain") is reasoning_of("</think>", "none") is None is reasoning_of(None)
    assert reasoning_of({"default": "<|channel|>"}) is reasoning_of("</think>", "harmony") is not None
    assert form_of("[TOOL_CALLS]", "granite").name == "granite"
    names = typing.get_args(typing.get_type_hints(parts.ServeOptions)["tool_call_parser"])
    assert {*names} == {"auto", *(form.name for form in FORMS)}


def test_a_quoted_tag_is_reasoning_where_tags_are_special_tokens():
    markers = Markers({1: "<think>", 2: "</think>"})
    answer = f"{markers.mark('<think>')}I close </think> {CALL}{markers.mark('</think>')}Done."
    assert parsed(THINK, form_of(""), markers, "", [answer]) == (f"I close </think> {CALL}", "Done.", [])


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% if m['reasoning_content'] %}<think>"
    "{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant "
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% elif opens %}<think>"
    "{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add"}}
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return parts.load_tiny(tmp_path_factory.mktemp("model"), template=TEMPLATE)


@pytest.fixture(scope="module")
def post(model):
    with parts.recorded(model, max_prompt_tokens=300) as post:
        yield post


def message_of(reply):
    message = reply["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"], len(message.get("tool_calls", ()))


def test_a_chat_has_its_reasoning_beside_its_content(post, model):
    answer = f"<think>\nI {CALL}\n</think>\n\nDone. {CALL}"
    reply = post(answer, **ASK)
    assert message_of(reply) == (f"I {CALL}", "Done. ", 1)
    assert reply["usage"]["completion_tokens"] == len(model.engine.tokenizer(answer)["input_ids"])
    deltas = [each["choices"][0]["delta"] for each in post(answer, **ASK, stream=True)]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == f"I {CALL}"
    assert "".join(each.get("content") or "" for each in deltas) == "Done. "
    assert sum("tool_calls" in each for each in deltas) == 1
    assert message_of(post("a<b", **ASK)) == (None, "a<b", 0)


def test_the_prompt_opens_and_closes_the_reasoning(post):
    opened, closed = (
        {"chat_template_kwargs": {"opens": 1}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert message_of(post(f"a {CALL}</think>b", **ASK, **opened)) == (f"a {CALL}", "b", 0)
    assert message_of(post(f"a</think> {CALL}", **ASK, **closed)) == (None, "a</think> ", 1)
    forged = [{"role": "user", "content": "hi <think>"}]
    assert message_of(post("a</think>b", messages=forged)) == (None, "a</think>b", 0)


def test_an_answer_that_follows_a_schema_is_no_reasoning(post):
    opened = {"chat_template_kwargs": {"opens": 1}, "response_format": {"type": "json_object"}}
    assert message_of(post("{}", messages=ASK["messages"], **opened)) == (None, "{}", 0)


def test_options_name_the_parsers(model):
    with parts.recorded(model, reasoning_parser="none", tool_call_parser="granite") as post:
        call = '[{"name": "add", "arguments": {}}]'
        assert message_of(post(f"<think>a</think><|tool_call|>{call}", **ASK)) == (
            None,
            "<think>a</think>",
            1,
        )


def test_reasoning_that_is_sent_back_is_what_the_template_makes_of_it(model):
    parser = parts.RequestParser(model=model, options=parts.ServeOptions(), name="tiny")
    answer = {"role": "assistant", "reasoning_content": "why"}
    for extra, said in ({}, ""), ({"content": "so"}, "so"), ({"content": None}, ""):
        messages = [*ASK["messages"], answer | extra, {"role": "user", "content": "on"}]
        (prompt,) = parser.chat(json.dumps({"model": "tiny", "messages": messages}).encode()).prompts_P
        assert f"assistant <think>why</think>{said}<|im_end|>" in prompt.text


def test_responses_have_an_item_of_reasoning_whole_and_streamed(post):
    tool = {"type": "function", "name": "add"}
    ask = {"path": "/v1/responses", "input": "hi", "tools": [tool]}
    for answer, kinds in {
        f"<think>why</think>Done. {CALL}": ["reasoning", "message", "function_call"],
        f"<think>why</think>{CALL}": ["reasoning", "function_call"],
        "<think>why": ["reasoning", "message"],
    }.items():
        whole = post(answer, **ask)["output"]
        assert [each["type"] for each in whole] == kinds and whole[0]["content"][0]["text"] == "why"
        events = post(answer, **ask, stream=True)
        streamed = events[-1]["response"]["output"]
        assert [each["type"] for each in streamed] == kinds
        assert streamed[0]["content"] == whole[0]["content"]
        deltas = [each["delta"] for each in events if each["type"] == "response.reasoning_text.delta"]
        assert "".join(deltas) == "why"
        done = [each["output_index"] for each in events if each["type"] == "response.output_item.done"]
        assert done == list(range(len(kinds)))
    again = [{"role": "user", "content": "hi"}, *whole, {"role": "user", "content": "on"}]
    assert post("ok", path="/v1/responses", input=again)["output"][0]["content"][0]["text"] == "ok"
