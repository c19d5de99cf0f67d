import datetime
import json

import datasets
import pytest

from material import BOS, END, START, jsonl, tokenizer
from qerl.config import SftConfig, TaskConfig
from qerl.errors import UserError
from qerl.tasks.rows.demonstrations import Demonstrator
from qerl.tasks.rows.prompt import Renderer, render_chat, set_template_date, set_template_variables
from qerl.tasks.rows.table import open_rows

ROW = {"prompt": "What is 1 + 2?", "answer": "3", "hint": "{curly}"}


def rendered(tmp_path, row=ROW, chat_template=None, **fields):
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", [row]), **fields)
    made = tokenizer() if chat_template is None else tokenizer(chat_template)
    return Renderer(config, open_rows(config)[0], made).prompt(0, index=7)


def plain(tmp_path, row=ROW, **fields):
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", [row]), **fields)
    return Renderer(config, open_rows(config)[0], tokenizer(chat_template=None)).prompt(0, index=7)


def refused(tmp_path, row=ROW, **fields) -> str:
    with pytest.raises(UserError) as error:
        rendered(tmp_path, row, **fields)
    return str(error.value)


def test_a_string_becomes_the_user_message_in_the_chat_template(tmp_path):
    prompt = rendered(tmp_path)
    assert prompt.index == 7
    assert prompt.text == "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.messages == [{"role": "user", "content": "What is 1 + 2?"}]
    assert prompt.columns == {"answer": "3", "hint": "{curly}"}


def test_special_tokens_are_those_of_the_chat_template_and_no_others(tmp_path):
    tokens_T = rendered(tmp_path).tokens_T
    assert [t for t in tokens_T if t >= BOS] == [START, END, START]
    assert tokenizer().decode(tokens_T) == rendered(tmp_path).text


def test_a_tokenizer_without_a_chat_template_gets_the_plain_text_with_its_own_special_tokens(tmp_path):
    prompt = plain(tmp_path, system_prompt="Add.")
    assert prompt.text == "Add.\n\nWhat is 1 + 2?"
    assert (prompt.tokens_T[0], prompt.messages) == (BOS, None)
    assert len(prompt.tokens_T) == 1 + len(prompt.text)


def test_the_template_is_filled_with_columns_and_question_stands_for_the_prompt(tmp_path):
    template = "{question} ({prompt}) {hint} {{x}} {answer:>3}"
    prompt = rendered(tmp_path, template=template)
    assert prompt.messages[0]["content"] == "What is 1 + 2? (What is 1 + 2?) {curly} {x}   3"


DAY = "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_template_gets_the_day_that_is_set_and_else_today():
    made, messages = tokenizer(DAY), [{"role": "user", "content": "!"}]
    set_template_date(made, "2023-04-05")
    assert render_chat(made, messages)[0] == "05 April 2023!"
    assert (
        Demonstrator(made, SftConfig(data="-"), frozenset())._render(messages, True, {}) == "05 April 2023!"
    )
    made = tokenizer(DAY)
    set_template_date(made, None)
    assert render_chat(made, messages)[0] == made.apply_chat_template(messages, tokenize=False)


FORMATS = (
    "%d %b %Y",
    "%A, %B %-d, %y",
    "%Y-%m-%d",
    "%F",
    "%D",
    "%a %j week %V",
    "%Y-%m-%dT%H:%M:%S",
    "on %d/%m",
)


@pytest.mark.parametrize("day", ["2024-02-29", "2026-11-09"])
def test_the_day_is_written_in_every_format_as_python_writes_it(day):
    for format in FORMATS:
        made = tokenizer(f"{{%- set date_string = strftime_now({format!r}) %}}{{{{ date_string }}}}")
        set_template_date(made, day)
        expected = datetime.datetime.fromisoformat(day).strftime(format)
        assert render_chat(made, [{"role": "user", "content": "!"}])[0] == expected


@pytest.mark.parametrize("day", ["today", "2026-1-2", "2026-02-30", "20260102", ""])
def test_a_day_that_is_none_is_refused_by_name(day):
    with pytest.raises(UserError, match=r"task\.chat_template_date must be a day like 2026-11-29, got"):
        TaskConfig(chat_template_date=day)


def test_a_question_column_needs_no_prompt_column(tmp_path):
    prompt = rendered(tmp_path, {"question": "1 + 1", "answer": "2"})
    assert prompt.messages[0]["content"] == "1 + 1"
    assert prompt.columns == {"question": "1 + 1", "answer": "2"}


def test_parts_of_a_column_can_be_named(tmp_path):
    row = {"metadata": {"expression": "5 + 4"}, "answer": "9"}
    prompt = rendered(tmp_path, row, template="What is {metadata[expression]}?")
    assert prompt.messages[0]["content"] == "What is 5 + 4?"


def test_a_prompt_column_beside_a_question_column_is_never_guessed(tmp_path):
    row = ROW | {"question": "Another?"}
    assert "both 'prompt' and 'question'" in refused(tmp_path, row)
    assert rendered(tmp_path, row, template="{prompt}").messages[0]["content"] == "What is 1 + 2?"
    assert rendered(tmp_path, row, prompt_column="question").messages[0]["content"] == "Another?"
    both = rendered(tmp_path, row, template="{prompt} {question}").messages[0]["content"]
    assert both == "What is 1 + 2? Another?"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{qestion}", "no column 'qestion', which"),
        ("{question} {level}", "no column 'level', which"),
        ("\\boxed{}", "write {{ and }} for braces"),
        ("{question", "expected '}'"),
        ("{hint.nothing}", "AttributeError"),
        ("{answer:d}", "ValueError"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(tmp_path, template, said):
    message = refused(tmp_path, template=template)
    assert "task.template" in message and said in message


def test_a_template_is_refused_before_a_row_is_rendered_and_with_the_columns_there_are(tmp_path):
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", [ROW]), template="{qestion}")
    with pytest.raises(UserError, match="there are: prompt, answer, hint"):
        Renderer(config, open_rows(config)[0], tokenizer())


def test_a_missing_prompt_column_is_refused_with_the_columns_there_are(tmp_path):
    said = "has no column 'problem' (there are: prompt, answer, hint); set task.prompt_column to one of them"
    assert refused(tmp_path, prompt_column="problem").endswith(said)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "{not a field}"},
]


def test_a_list_of_messages_is_the_conversation_and_no_template_is_applied(tmp_path):
    prompt = rendered(tmp_path, {"prompt": TALK, "answer": "3"}, template="{no} {such} {column}")
    assert prompt.messages == TALK
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{not a field}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt.columns == {"answer": "3"}


def test_a_conversation_stays_one_without_a_chat_template(tmp_path):
    prompt = plain(tmp_path, {"prompt": TALK, "answer": "3"})
    assert prompt.text == "Be brief.\n\n{not a field}"
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_the_system_message_of_the_config_comes_first_and_replaces_the_rows_own(tmp_path):
    assert rendered(tmp_path, system_prompt="Add.").messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "What is 1 + 2?"},
    ]
    replaced = rendered(tmp_path, {"prompt": TALK, "answer": "3"}, system_prompt="Add.").messages
    assert [m["content"] for m in replaced] == ["Add.", "{not a field}"]


def test_a_conversation_that_ends_with_the_assistant_is_gone_on_with(tmp_path):
    talk = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "<think>Well"}]
    prompt = rendered(tmp_path, {"prompt": talk, "answer": "3"})
    assert prompt.text.endswith("<|im_start|>assistant\n<think>Well")


def test_messages_that_the_chat_template_refuses_are_the_users_to_mend(tmp_path):
    strict = "{{ raise_exception('System role not supported') }}"
    assert "System role not supported" in refused(tmp_path, chat_template=strict, system_prompt="Add.")


def test_columns_that_are_not_plain_values_are_left_out(tmp_path):
    path = tmp_path / "x.parquet"
    row = {
        "prompt": "a",
        "answer": 1.5,
        "day": datetime.date(2026, 1, 2),
        "raw": b"\x00",
        "tags": ["x", None],
    }
    datasets.Dataset.from_list([row]).to_parquet(str(path))
    config = TaskConfig(name=str(path))
    prompt = Renderer(config, open_rows(config)[0], tokenizer()).prompt(0, index=0)
    assert prompt.columns == {"answer": 1.5, "tags": ["x", None]}


@pytest.mark.parametrize(
    "value", [False, None, 3, -1.5, 'a "b" {% end %} \n \\ \U0001f600', [{"a": [1, None]}]], ids=repr
)
def test_variables_of_the_template_have_their_json_values(value):
    made = tokenizer("\n{{ x | tojson }}{% for m in messages %}|{{ m.content }}{{ x is none }}{% endfor %}")
    set_template_variables(made, {"x": value})
    written, end = render_chat(made, [{"role": "user", "content": "hi"}])[0].removeprefix("\n").rsplit("|", 1)
    assert json.loads(written) == value and end == f"hi{value is None}"


def test_variables_that_are_no_object_are_refused():
    with pytest.raises(UserError, match="must be a JSON object, got \\[1\\]"):
        TaskConfig(chat_template_kwargs="[1]")
