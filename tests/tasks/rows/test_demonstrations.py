"""Rows to imitate: which tokens are learned, held to transformers' own mask, and which rows are refused."""

import json

import pytest
from transformers import AutoTokenizer

import tiny_run
from qerl.config import SftConfig
from qerl.errors import UserError
from qerl.tasks.rows.demonstrations import Demonstrator
from qerl.tasks.rows.prompt import BadRow
from qerl.tasks.rows.sft_rows import DEMONSTRATIONS, SftRows

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]
MARKED = (
    "{% for m in messages %}<|im_start|>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
FORGETFUL = (  # only the last turn keeps its whole text, as Qwen3's reasoning
    "{% for m in messages %}<|im_start|>"
    "{% if m['role'] == 'assistant' and not loop.last %}...{% else %}{{ m['content'] }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_run.write_model(tmp_path_factory.mktemp("model")))


def made(tokenizer, row, template=None, **settings):
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        tokenizer.chat_template = template
    demonstrator = Demonstrator(
        tokenizer, SftConfig(data="-", **settings), frozenset([tokenizer.eos_token_id])
    )
    return demonstrator.demonstrations(row)


def learned(tokenizer, demonstration):
    """The learned tokens as text, each run of them apart."""
    group = demonstration.group(0)
    (sample,) = group.samples_G
    runs, last = [], None
    for index in sample.sampled_indices:
        runs += [[]] if last is None or index != last + 1 else []
        runs[-1].append(sample.tokens_T[index])
        last = index
    return [tokenizer.decode(run) for run in runs]


def test_the_learned_tokens_are_those_that_transformers_marks(tokenizer):
    (one,) = made(tokenizer, {"messages": CHAT}, MARKED)
    marking = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    marking.chat_template = MARKED
    truth = marking.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert one.tokens_T.tolist() == truth["input_ids"]
    assert list(one.learned_T) == truth["assistant_masks"] and sum(one.learned_T) > 10
    assert learned(tokenizer, one) == ["2<|im_end|>", "It is 4.<|im_end|>"]


def test_the_prompt_is_what_the_sampler_would_be_given(tokenizer):
    (one,) = made(tokenizer, {"messages": CHAT})
    prompt = one.prompt(7)
    text = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.text == text and prompt.tokens_T == tokenizer(text)["input_ids"]
    assert (prompt.index, prompt.messages, prompt.columns) == (7, CHAT[:2], {"answer": "2"})


def test_a_template_that_rewrites_earlier_turns_gives_each_turn_its_own_prompt(tokenizer):
    first, second = made(tokenizer, {"messages": CHAT}, FORGETFUL)
    assert learned(tokenizer, first) == ["2<|im_end|>"]
    assert learned(tokenizer, second) == ["It is 4.<|im_end|>"]
    assert second.prompt(0).text.endswith("...<|im_end|><|im_start|>And 2 + 2?<|im_end|><|im_start|>")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1 + 1 =", "completion": " 2"}, [" 2<|im_end|>"]),
        ({"prompt": CHAT[:2], "completion": CHAT[2:3]}, ["2<|im_end|>"]),
        ({"prompt": CHAT[:4], "completion": CHAT[4:]}, ["It is 4.<|im_end|>"]),
        ({"text": "abc"}, ["bc<|im_end|>"]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "ho"},
                    {"from": "human", "value": "?"},
                ]
            },
            ["ho<|im_end|>"],
        ),
    ],
    ids=["texts", "messages", "only-the-completion", "plain", "sharegpt"],
)
def test_each_form_learns_what_it_says(tokenizer, row, expected):
    (one,) = made(tokenizer, row)
    assert learned(tokenizer, one) == expected


def test_without_assistant_only_loss_every_token_but_the_first_is_learned(tokenizer):
    (one,) = made(tokenizer, {"messages": CHAT}, assistant_only_loss=False)
    assert sum(one.learned_T) == len(one.tokens_T) - 1


def test_a_long_row_is_cut_and_one_with_nothing_left_is_refused(tokenizer):
    whole = made(tokenizer, {"messages": CHAT})[0]
    (cut,) = made(tokenizer, {"messages": CHAT}, max_length=20)
    assert cut.tokens_T == whole.tokens_T[:20] and 0 < sum(cut.learned_T) < sum(whole.learned_T)
    with pytest.raises(BadRow, match="nothing to learn in its first 5 tokens"):
        made(tokenizer, {"messages": CHAT}, max_length=5)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": CHAT[:2]}, "no assistant's turn"),
        ({"messages": CHAT[2:3]}, "no assistant's turn after another message"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": "hello"}, "messages is a text that is not JSON"),
        ({"messages": [{"content": "hello"}]}, "message 1 has no role"),
        ({"messages": [CHAT[1], {"role": "assistant"}]}, "message 2 has no content"),
        ({"messages": [CHAT[1], {"role": "assistant", "content": 5}]}, "message 2 is not a text"),
        ({"prompt": "a", "completion": 3}, "neither two texts"),
        ({"prompt": "", "completion": "b"}, "prompt is empty"),
        ({"text": None}, "is empty"),
        ({"text": "a", "other": 1}, None),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(tokenizer, row, reason):
    if reason is None:
        assert made(tokenizer, row)
        return
    with pytest.raises(BadRow, match=reason):
        made(tokenizer, row)


def test_a_call_that_the_template_leaves_out_is_refused_and_one_that_it_shows_is_learned(tokenizer):
    call = {"type": "function", "function": {"name": "look", "arguments": {"place": "Rome"}}}
    row = {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "sun"},
            {"role": "assistant", "content": "sunny"},
        ]
    }
    with pytest.raises(BadRow, match="the chat template leaves out the tool_calls of message 2"):
        made(tokenizer, row)
    calls = "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}"
    shown = tiny_run.CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}" + calls)
    (one,) = made(tokenizer, row, shown)
    assert "look<|im_end|>" in learned(tokenizer, one)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(tokenizer, data, max_evaluated=100, **settings):
    config = SftConfig(data=data, **settings)
    stop_ids = frozenset([tokenizer.eos_token_id])
    return SftRows.read(config, tokenizer, stop_ids, DEMONSTRATIONS, max_evaluated=max_evaluated, seed=0)


def test_bad_and_cut_rows_are_counted_in_one_line(tokenizer, tmp_path):
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": [{"role": "user"}]}]
    data = write(tmp_path / "chats.jsonl", rows)
    (line,) = read(tokenizer, data, max_length=20).notices
    assert "of 3 rows 1 cut to 20 tokens; 2 left out (first: line 2 has no assistant's turn" in line


def test_no_row_is_learned_and_evaluated(tokenizer, tmp_path):
    rows = [{"prompt": f"{i % 15} + 1 =", "completion": str(i % 15 + 1)} for i in range(20)]
    found = read(tokenizer, write(tmp_path / "sums.jsonl", rows), eval_fraction=0.25)
    learned = {each.tokens_T.tobytes() for each in found.learned}
    assert len(found.evaluated) == 5 and not learned & {e.tokens_T.tobytes() for e in found.evaluated}
    assert len(found.learned) == 10 and "5 rows are evaluation rows" in found.notices[-1]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tokenizer, tmp_path):
    rows = [{"prompt": f"{i} + 1 =", "completion": str(i + 1)} for i in range(10)]
    found = read(tokenizer, write(tmp_path / "sums.jsonl", rows), eval_fraction=0.0)
    epochs = [[g.prompt.text for step in range(3) for g in found.batch(3 * e + step, 4)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"{i} + 1 =" for i in range(10))
    assert epochs[0] != epochs[1] and len(found.batch(2, 4)) == 2
    assert [g.prompt.text for g in found.batch(3, 4)] == epochs[1][:4]


def test_a_table_of_another_form_is_refused_with_its_columns(tokenizer, tmp_path):
    data = write(tmp_path / "rows.jsonl", [{"source": "1 + 1", "target": "2"}])
    with pytest.raises(UserError, match=r"columns prompt and completion, .*are source, target. .*jq -c"):
        read(tokenizer, data)


def test_rows_that_are_all_bad_end_in_one_line(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"no row is left to learn from: .*left out \(first: "):
        read(tokenizer, write(tmp_path / "rows.jsonl", [{"messages": CHAT[:2]}]))


def test_a_stop_token_beyond_the_tokenizers_vocabulary_changes_nothing(tokenizer):
    config, stop_ids = SftConfig(data="-"), {tokenizer.eos_token_id}
    expected = Demonstrator(tokenizer, config, frozenset(stop_ids)).demonstrations({"messages": CHAT})
    assert (
        Demonstrator(tokenizer, config, frozenset(stop_ids | {270})).demonstrations({"messages": CHAT})
        == expected
    )
