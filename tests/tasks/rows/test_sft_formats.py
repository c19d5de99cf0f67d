"""Rows in the forms of other tools: tokens and loss mask against a plain reference, and what is refused."""

import json
import random
import shutil
import subprocess

import pytest
from transformers import AutoTokenizer

import tiny_run
from qerl.config import SftConfig
from qerl.errors import UserError
from qerl.tasks.rows.demonstrations import Demonstrator, check_columns
from qerl.tasks.rows.prompt import BadRow
from qerl.tasks.rows.sft_rows import DEMONSTRATIONS, SftRows

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson + '\\n' }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role + ' ' + m.name if m.name else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<call>{"name": "look", "arguments": {"place": "Rome"}}</call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOOLS = f"tools\n{json.dumps(TOOL)}\n"
S, U, A, T = "system", "user", "assistant", "tool"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.write_model(tmp_path_factory.mktemp("model")))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def demonstrator(tokenizer, **settings):
    return Demonstrator(tokenizer, SftConfig(data="-", **settings), frozenset([tokenizer.eos_token_id]))


def plain(tokenizer, turns, *, tools=""):
    """The tokens and the mask of (role, text, is learned) up to the assistant's last stop token."""
    parts = [("<|im_start|>" + tools + "<|im_end|>\n", False)] if tools else []
    for role, text, is_learned in turns:
        parts += [(f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>", is_learned), ("\n", False)]
    last = max(i for i, (text, _) in enumerate(parts) if text == f"<|im_start|>{A}\n")
    tokens, mask = [], []
    for text, is_learned in parts[: last + 2]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        mask += [int(is_learned)] * len(ids)
    return tokens, mask


def openai(*turns, **columns):
    return {"messages": [{"role": role, "content": text, **more} for role, text, more in turns], **columns}


def sharegpt(*turns, **columns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **columns}


CASES = {
    "openai": (openai((S, "s", {}), (U, "q", {}), (A, "a", {})), [(S, "s", 0), (U, "q", 0), (A, "a", 1)]),
    "weight-0": (
        openai((U, "q", {}), (A, "bad", {"weight": 0}), (U, "no", {}), (A, "good", {"weight": 1})),
        [(U, "q", 0), (A, "bad", 0), (U, "no", 0), (A, "good", 1)],
    ),
    "weight-0-between": (
        openai(
            (U, "q", {}), (A, "a", {}), (U, "r", {}), (A, "bad", {"weight": 0.0}), (U, "t", {}), (A, "b", {})
        ),
        [(U, "q", 0), (A, "a", 1), (U, "r", 0), (A, "bad", 0), (U, "t", 0), (A, "b", 1)],
    ),
    "train-false": (
        openai(
            (U, "q", {"train": False}), (A, "bad", {"train": False}), (U, "r", {}), (A, "b", {"train": True})
        ),
        [(U, "q", 0), (A, "bad", 0), (U, "r", 0), (A, "b", 1)],
    ),
    "axolotl-training": (
        openai((U, "q", {}), (A, "a", {"training": True}), (U, "r", {}), (A, "bad", {"training": False})),
        [(U, "q", 0), (A, "a", 1), (U, "r", 0), (A, "bad", 0)],
    ),
    "swift-loss": (
        openai((U, "q", {}), (A, "bad", {"loss": False}), (U, "r", {}), (A, "a", {"loss": None})),
        [(U, "q", 0), (A, "bad", 0), (U, "r", 0), (A, "a", 1)],
    ),
    "text-parts": (
        openai(
            (U, [{"type": "text", "text": "q"}, {"type": "text", "text": "r", "image_url": None}], {}),
            (A, "a", {}),
        ),
        [(U, "qr", 0), (A, "a", 1)],
    ),
    "messages-as-json": (
        {"messages": json.dumps([{"role": U, "content": "q"}, {"role": A, "content": "a"}])},
        [(U, "q", 0), (A, "a", 1)],
    ),
    "openai-functions": (
        openai(
            (U, "q", {}),
            (A, None, {"function_call": {"name": "look", "arguments": '{"place": "Rome"}'}}),
            (T, "sun", {}),
            (A, "a", {}),
            functions=[TOOL["function"]],
        ),
        [("tools", "", 0), (U, "q", 0), (A, CALL, 1), (T, "sun", 0), (A, "a", 1)],
    ),
    "tool-calls-with-text-arguments": (
        openai(
            (U, "q", {}),
            (
                A,
                "",
                {"tool_calls": [{"id": "1", "function": {"name": "look", "arguments": '{"place": "Rome"}'}}]},
            ),
            (T, "sun", {}),
            (A, "a", {}),
            tools=json.dumps([TOOL]),
        ),
        [("tools", "", 0), (U, "q", 0), (A, CALL, 1), (T, "sun", 0), (A, "a", 1)],
    ),
    "tools-as-list-of-texts": (
        openai((U, "q", {}), (A, "a", {}), tools=[json.dumps(TOOL["function"])]),
        [("tools", "", 0), (U, "q", 0), (A, "a", 1)],
    ),
    "sharegpt-system": (
        sharegpt(("human", "q"), ("gpt", "a"), system="s"),
        [(S, "s", 0), (U, "q", 0), (A, "a", 1)],
    ),
    "sharegpt-system-turn": (
        sharegpt(("system", "s"), ("human", "q"), ("gpt", "a"), system="s"),
        [(S, "s", 0), (U, "q", 0), (A, "a", 1)],
    ),
    "sharegpt-tools": (
        sharegpt(
            ("human", "q"),
            ("function_call", '{"name": "look", "arguments": {"place": "Rome"}}'),
            ("observation", '{"weather": "sun"}'),
            ("gpt", "a"),
            tools=json.dumps([TOOL["function"]]),
        ),
        [("tools", "", 0), (U, "q", 0), (A, CALL, 1), (T, '{"weather": "sun"}', 0), (A, "a", 1)],
    ),
    "sharegpt-two-calls": (
        sharegpt(
            ("human", "q"),
            (
                "function_call",
                f'[{CALL[6:-7]}, {{"name": "look", "arguments": "{{\\"place\\": \\"Rome\\"}}"}}]',
            ),
            ("function_response", "sun"),
            ("gpt", "a"),
            system="",
            tools="[]",
        ),
        [(U, "q", 0), (A, CALL + CALL, 1), (T, "sun", 0), (A, "a", 1)],
    ),
    "sharegpt-weight": (
        {
            "conversations": [
                {"from": "human", "value": "q", "weight": None},
                {"from": "gpt", "value": "bad", "weight": 0},
                {"from": "human", "value": "r", "weight": 0},
                {"from": "gpt", "value": "a", "weight": 1},
            ]
        },
        [(U, "q", 0), (A, "bad", 0), (U, "r", 0), (A, "a", 1)],
    ),
    "trl-messages-with-weight": (
        {
            "prompt": [{"role": U, "content": "q"}, {"role": A, "content": "b"}, {"role": U, "content": "r"}],
            "completion": [
                {"role": A, "content": "bad", "weight": 0},
                {"role": U, "content": "t"},
                {"role": A, "content": "a"},
            ],
            "system": "s",
        },
        [(S, "s", 0), (U, "q", 0), (A, "b", 0), (U, "r", 0), (A, "bad", 0), (U, "t", 0), (A, "a", 1)],
    ),
    "alpaca": ({"instruction": "q", "input": "x", "output": "a"}, [(U, "q\n\nx", 0), (A, "a", 1)]),
    "alpaca-without-input": ({"instruction": "q", "input": "", "output": "a"}, [(U, "q", 0), (A, "a", 1)]),
    "alpaca-with-history": (
        {
            "instruction": "q",
            "input": None,
            "output": "a",
            "system": "s",
            "history": [["b", "c"], ["d", "e"]],
        },
        [(S, "s", 0), (U, "b", 0), (A, "c", 1), (U, "d", 0), (A, "e", 1), (U, "q", 0), (A, "a", 1)],
    ),
    "dolly": ({"instruction": "q", "context": "x", "response": "a"}, [(U, "q\n\nx", 0), (A, "a", 1)]),
    "dolly-without-context": (
        {"instruction": "q", "context": "", "response": "a"},
        [(U, "q", 0), (A, "a", 1)],
    ),
    "question-answer": ({"question": "q", "answer": "a"}, [(U, "q", 0), (A, "a", 1)]),
    "openorca": (
        {"system_prompt": "s", "question": "q", "response": "a"},
        [(S, "s", 0), (U, "q", 0), (A, "a", 1)],
    ),
    "metamath": ({"query": "q", "response": "a"}, [(U, "q", 0), (A, "a", 1)]),
    "numina": ({"problem": "q", "solution": "a"}, [(U, "q", 0), (A, "a", 1)]),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_mask_of_a_form_are_those_of_a_plain_reference(tokenizer, name):
    row, turns = CASES[name]
    has_tools = turns[0][0] == "tools"
    maker = demonstrator(tokenizer)
    (one,) = maker.demonstrations(row)
    tokens, mask = plain(tokenizer, turns[has_tools:], tools=TOOLS if has_tools else "")
    assert one.tokens_T.tolist() == tokens, tokenizer.decode(one.tokens_T.tolist())
    assert list(one.learned_T) == mask
    assert not maker.unused_columns and not maker.left_out
    first = next(i for i, turn in enumerate(turns) if turn[2])
    assert one.answer == turns[first][1] and len(one.messages or ()) == first - has_tools
    before = tokenizer.decode(tokens[: mask.index(1)])
    assert one.prompt(0).text == before == tokenizer.decode(one.prompt(0).tokens_T)


def test_the_group_that_is_learned_has_no_token_of_a_turn_of_weight_0(tokenizer):
    row = CASES["weight-0-between"][0]
    (one,) = demonstrator(tokenizer).demonstrations(row)
    (sample,) = one.group(0).samples_G
    learned = tokenizer.decode([sample.tokens_T[i] for i in sample.sampled_indices])
    assert learned == "a<|im_end|>b<|im_end|>"


@pytest.mark.parametrize("seed", range(20))
def test_any_weights_are_the_mask_of_the_plain_reference(tokenizer, seed):
    rng = random.Random(seed)
    turns = [
        (role, f"{role} {i} é", {"weight": rng.randrange(2)} if role == A else {})
        for i in range(4)
        for role in (U, A)
    ]
    turns[1][2]["weight"] = 1
    expected = [(role, text, more.get("weight", 0)) for role, text, more in turns]
    (one,) = demonstrator(tokenizer).demonstrations(openai(*turns))
    assert (one.tokens_T.tolist(), list(one.learned_T)) == plain(tokenizer, expected)


def test_segments_are_learned_by_their_labels_and_no_token_is_added(tokenizer):
    texts = [("<|im_start|>q\n", False), ("a<|im_end|>", True), ("", False), ("b", False), ("c", True)]
    row = {"segments": [{"label": label, "text": text} for text, label in texts]}
    (one,) = demonstrator(tokenizer).demonstrations(row)
    pairs = [
        (token, label)
        for text, label in texts
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]
    ]
    assert list(zip(one.tokens_T, map(bool, one.learned_T), strict=True)) == pairs
    (whole,) = demonstrator(tokenizer, assistant_only_loss=False).demonstrations(row)
    assert sum(whole.learned_T) == len(pairs) - 1


def test_without_assistant_only_loss_all_but_turns_of_weight_0_is_learned(tokenizer):
    row, _ = CASES["weight-0"]
    (one,) = demonstrator(tokenizer, assistant_only_loss=False).demonstrations(row)
    left_out = len(tokenizer("bad<|im_end|>", add_special_tokens=False)["input_ids"])
    assert len(one.learned_T) - sum(one.learned_T) == left_out + 1  # nothing predicts the first token
    assert (
        tokenizer.decode([t for t, m in zip(one.tokens_T, one.learned_T, strict=True) if not m][1:])
        == "bad<|im_end|>"
    )


def test_a_template_that_rewrites_turns_learns_those_of_weight_1_alone(tokenizer):
    forgetful = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    forgetful.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' }}"
    )
    row = openai(
        (U, "q", {}), (A, "bad", {"weight": 0}), (U, "r", {}), (A, "a", {}), (U, "t", {}), (A, "b", {})
    )
    made = demonstrator(forgetful).demonstrations(row)
    assert [one.answer for one in made] == ["a", "b"]
    with pytest.raises(BadRow, match="weight 0 needs assistant_only_loss"):
        demonstrator(forgetful, assistant_only_loss=False).demonstrations(row)


QA = [{"role": U, "content": "q"}, {"role": A, "content": "a"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (openai((U, "q", {}), (A, "a", {"weight": 0.5})), r"weight of message 2 is 0.5; it must be 0 or 1"),
        (openai((U, "q", {}), (A, "a", {"train": "no"})), r"train of message 2 is 'no'"),
        (
            openai((U, "q", {}), (A, "a", {"weight": float("nan")})),
            "'messages' has a number that is not a finite",
        ),
        (
            openai((U, "q", {}), (A, "a", {"weight": 0, "train": True})),
            "weight and train of message 2 differ",
        ),
        (openai((U, "q", {"weight": 1}), (A, "a", {})), r"message 1 \(user\) says that it is learned"),
        (openai((U, "q", {}), (A, "a", {"weight": 0})), "no assistant's turn that is learned"),
        (openai((U, "q", {}), (A, "a", {"train_detail": []})), "message 2 has train_detail"),
        (openai((U, "q", {}), (A, "a", {"loss_scale": 0})), "message 2 has loss_scale"),
        (
            openai((U, [{"type": "image_url", "image_url": "x"}], {}), (A, "a", {})),
            "message 1: a part is not a text .*image_url",
        ),
        (openai((U, ["q"], {}), (A, "a", {})), "message 1: a part is not a text"),
        (
            openai((U, [{"type": "text", "text": "q", "cache_control": {}}], {}), (A, "a", {})),
            "a text part has 'cache_control'",
        ),
        (
            openai((U, "q", {}), (A, "", {"tool_calls": [{"name": 5}]})),
            "message 2: a tool call has no function",
        ),
        (
            openai((U, "q", {}), (A, "", {"tool_calls": [{"name": "look", "arguments": "Rome"}]})),
            "message 2: arguments of 'look' is a text that is not JSON",
        ),
        (
            openai((U, "q", {}), (A, "", {"tool_calls": [{"name": "look", "arguments": '{"x": NaN}'}]})),
            "is a text that is not JSON",
        ),
        (
            openai(
                (U, "q", {}), (A, "", {"tool_calls": [{"name": "look", "arguments": '{"x": "\\ud83d"}'}]})
            ),
            "not valid Unicode",
        ),
        (openai((U, "q", {}), (A, "a", {}), tools="search"), "tools is a text that is not JSON"),
        (openai((U, "q", {}), (A, "a", {}), tools=["search"]), "tools is a text that is not JSON"),
        (openai((U, "q", {}), (A, "a", {}), tools={"name": "look"}), "tools is not a list of functions"),
        (
            openai((U, "q", {}), (A, "a", {}), tools=[{"type": "web_search"}]),
            "tools is not a list of functions",
        ),
        (
            openai((S, "s", {}), (U, "q", {}), (A, "a", {}), system="other"),
            "system column and its system message",
        ),
        (openai((U, "q", {}), (A, "a", {}), system=5), "system is not a text"),
        (
            openai((U, "q", {}), (A, "a", {}), chat_template_kwargs=[1]),
            "chat_template_kwargs is a list, not an object",
        ),
        (
            sharegpt(("human", "q"), ("narrator", "x"), ("gpt", "a")),
            "message 2 is from 'narrator'; known are human",
        ),
        (
            sharegpt(("human", "q"), ("function_call", "look(Rome)")),
            "message 2: the tool call is a text that is not JSON",
        ),
        (
            sharegpt(("human", "q"), ("function_call", '{"tool": "look"}')),
            "message 2: a tool call has no function with a name",
        ),
        (
            {"conversations": [{"from": "human", "role": "gpt", "value": "q"}]},
            "message 1 has both from and role",
        ),
        ({"conversations": [{"value": "q"}]}, "message 1 has no role"),
        ({"segments": [{"label": True}]}, "segment 1 is not an object with label and text"),
        ({"segments": [{"label": 1, "text": "a"}]}, "segment 1: label must be true or false"),
        (
            {"segments": [{"label": True, "text": "a", "weight": 2}]},
            "segment 1 is not an object with label and text",
        ),
        ({"segments": "abc"}, "segment 1 is not an object"),
        ({"segments": [{"label": False, "text": "ab"}]}, "has nothing to learn"),
        ({"instruction": "q", "output": 5}, "output is not a text"),
        ({"instruction": "", "input": "", "output": "a"}, "its instruction is empty"),
        ({"instruction": "q", "output": None}, "has no output"),
        ({"instruction": "q", "output": "a", "history": [["b"]]}, "history is not a list of pairs"),
        ({"question": "q", "answer": {"text": ["a"]}}, "answer is not a text"),
        ({"prompt": [], "completion": QA[1:]}, "its prompt is empty"),
        ({"completion": "a", "text": None}, "has no prompt"),
    ],
)
def test_what_cannot_be_learned_as_it_is_written_is_refused_by_name(tokenizer, row, reason):
    with pytest.raises(BadRow, match=reason):
        demonstrator(tokenizer).demonstrations(row)


def read(tokenizer, path, rows, **settings):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SftConfig(data=str(path), eval_fraction=0.0, **settings)
    return SftRows.read(
        config,
        tokenizer,
        frozenset([tokenizer.eos_token_id]),
        DEMONSTRATIONS,
        max_evaluated=0,
        seed=0,
    )


def test_a_column_that_is_not_used_is_named_and_counted(tokenizer, tmp_path):
    rows = [
        {"messages": QA, "source": "web", "id": 0, "empty": ""},
        {"messages": QA, "source": None, "id": 1, "text": "never learned"},
    ]
    found = read(tokenizer, tmp_path / "chats.jsonl", rows)
    (line,) = found.unused
    assert (
        line.endswith("chats.jsonl: not used: columns id (2 rows), source (1 row), text (1 row)")
        and not found.notices
    )
    (line,) = read(
        tokenizer, tmp_path / "p.jsonl", [{"prompt": "q", "completion": "a", "system": "s"}]
    ).unused
    assert line.endswith("not used: column system (1 row)")


def test_a_key_or_a_variable_that_the_template_leaves_out_is_named(tokenizer, tmp_path):
    chat = [
        {"role": U, "content": "q", "name": "Ann"},
        {"role": A, "content": "a", "reasoning_content": "hm"},
    ]
    deaf = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    deaf.chat_template = TEMPLATE.replace("if tools", "if false")
    rows = [{"messages": chat, "tools": [TOOL]}]
    (line,) = read(deaf, tmp_path / "chats.jsonl", rows).notices
    assert line.endswith(
        "of 1 row the chat template does not render tools, reasoning_content of assistant messages"
    )
    (line,) = read(tokenizer, tmp_path / "chats.jsonl", rows).notices
    assert line.endswith("the chat template does not render reasoning_content of assistant messages")


def test_a_message_that_the_template_drops_is_named(tokenizer, tmp_path):
    deaf = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    deaf.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content if not m.tool_calls and m.role != 'system' }}"
    )
    call = {"role": A, "content": "let me look", "tool_calls": [{"name": "look", "arguments": {}}]}
    chat = [{"role": S, "content": "s"}, QA[0], call, {"role": T, "content": "sun"}, QA[1]]
    (line,) = read(deaf, tmp_path / "chats.jsonl", [{"messages": chat}]).notices
    dropped = "content of system messages, content of assistant messages with tool_calls"
    assert line.endswith(f"the chat template does not render {dropped}")


def test_a_table_without_a_known_form_is_refused_with_a_conversion_that_works(tokenizer, tmp_path):
    rows = [{"src text": "1 + 1", 'it"s': "2"}, {"src text": "2\n+ 2", 'it"s': "4"}]
    with pytest.raises(UserError) as refused:
        check_columns("rows.jsonl", list(rows[0]), "text")
    command = str(refused.value).rpartition("To convert them: ")[2]
    (tmp_path / "ROWS.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.startswith("jq -c '{messages: ") and command.endswith(" ROWS.jsonl > chats.jsonl")
    if shutil.which("jq") is None:
        pytest.skip("jq is missing")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    made = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert [[m["content"] for m in row["messages"]] for row in made] == [["1 + 1", "2"], ["2\n+ 2", "4"]]


@pytest.mark.parametrize("name", ["alpaca", "sharegpt-system", "weight-0", "sharegpt-tools", "openorca"])
def test_a_control_token_in_a_message_of_any_form_is_text(tokenizer, name):
    row, turns = CASES[name]
    (before,) = demonstrator(tokenizer).demonstrations(row)
    (after,) = demonstrator(tokenizer).demonstrations(
        json.loads(json.dumps(row).replace('"q"', '"q<|im_end|>"'))
    )
    stop = tokenizer.eos_token_id
    assert after.tokens_T.count(stop) == before.tokens_T.count(stop)
    assert len(after.tokens_T) == len(before.tokens_T) + len("<|im_end|>")
    first = next(text for _, text, is_learned in turns if is_learned)
    assert sum(after.learned_T) == sum(before.learned_T) and after.answer == first
    assert "q<|im_end|>" in after.prompt(0).text
