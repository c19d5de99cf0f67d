"""Rows of preferences become the prompts and completions that TRL makes of them."""

import json

import pytest

import tiny_run
from qerl.config import DpoConfig, SftConfig
from qerl.errors import UserError
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.tasks.rows.preferences import mismatched
from qerl.tasks.rows.sft_rows import SftRows, form_of_rows

USER = {"role": "user", "content": "1 ?"}
PAIRED, UNPAIRED = DpoConfig(loss_type=("sigmoid",)), DpoConfig(loss_type=("kto",))


def says(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(tiny_run.write_model(tmp_path_factory.mktemp("model"))))


def read(tokenizer, folder, rows, dpo=PAIRED, **settings):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SftConfig(data=str(path), eval_fraction=0.0, **settings)
    stop_ids = frozenset([tokenizer.eos_token_id])
    return SftRows.read(config, tokenizer, stop_ids, form_of_rows(dpo), max_evaluated=9, seed=0)


def texts(tokenizer, rows):
    """(prompt, completion, ...) of each preference, with special tokens."""
    groups = [item.group(i) for i, item in enumerate(rows.learned)]
    tokens = [[g.prompt.tokens_T, *(s.tokens_T for s in g.samples_G)] for g in groups]
    return [tuple(tokenizer.decode(each) for each in row) for row in tokens]


CHAT = ("<|im_start|>1 ?<|im_end|><|im_start|>", "a<|im_end|>", "b<|im_end|>")
TEXT = ("2 + 2 =", " 4<|im_end|>", " 5<|im_end|>")
FORMS = {
    "conversations": ({"prompt": [USER], "chosen": [says("a")], "rejected": [says("b")]}, CHAT),
    "an implicit prompt": ({"chosen": [USER, says("a")], "rejected": [USER, says("b")]}, CHAT),
    "JSON texts": (
        {"chosen": json.dumps([USER, says("a")]), "rejected": json.dumps([USER, says("b")])},
        CHAT,
    ),
    "a text and whole conversations": (
        {"prompt": "1 ?", "chosen": [USER, says("a")], "rejected": [USER, says("b")]},
        CHAT,
    ),
    "answers as texts": ({"prompt": [USER], "chosen": "a", "rejected": "b"}, CHAT),
    "texts": ({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, TEXT),
    "texts that share their beginning": ({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, TEXT),
    "texts with their end": ({"prompt": TEXT[0], "chosen": " 4<|im_end|>", "rejected": " 5"}, TEXT),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_pair_is_read_in_each_form_of_trl(name, tokenizer, tmp_path):
    row, expected = FORMS[name]
    rows = read(tokenizer, tmp_path, [row])
    assert texts(tokenizer, rows) == [expected] and not rows.notices and not rows.unused
    assert rows.learned[0].is_chosen == (True, False)


def test_an_implicit_prompt_is_that_of_trl():
    trl = pytest.importorskip("trl")
    from qerl.tasks.rows.preferences import pair_of

    for row in (FORMS["an implicit prompt"][0], FORMS["texts that share their beginning"][0]):
        theirs = trl.extract_prompt(row)
        assert pair_of(row) == (theirs["prompt"], theirs["chosen"], theirs["rejected"])


def test_tools_results_and_earlier_answers_in_a_completion_are_not_learned(tokenizer, tmp_path):
    chosen = [says("a"), {"role": "tool", "content": "t"}, says("b")]
    rows = read(tokenizer, tmp_path, [{"prompt": [USER], "chosen": chosen, "rejected": [says("c")]}])
    (group,) = [item.group(0) for item in rows.learned]
    sample = group.samples_G[0]
    learned = [sample.tokens_T[i] for i in sample.sampled_indices]
    assert tokenizer.decode(learned) == "a<|im_end|>b<|im_end|>"
    assert tokenizer.decode(sample.tokens_T) == ("a<|im_end|><|im_start|>t<|im_end|><|im_start|>b<|im_end|>")


def test_labels_are_read_and_a_pair_is_both_of_its_completions(tokenizer, tmp_path):
    rows = read(
        tokenizer,
        tmp_path,
        [
            {"prompt": "x ", "completion": "y", "label": True},
            {"prompt": "x ", "completion": "z", "label": "false"},
            {"prompt": [USER], "chosen": [says("a")], "rejected": [says("b")]},
        ],
        UNPAIRED,
    )
    assert [item.is_chosen for item in rows.learned] == [(True,), (False,), (True,), (False,)]
    assert texts(tokenizer, rows)[0] == ("x ", "y<|im_end|>")
    assert texts(tokenizer, rows)[2:] == [CHAT[:2], (CHAT[0], CHAT[2])]


@pytest.mark.parametrize("limit", [9, 3])
def test_neither_fraction_nor_limit_parts_a_pair_of_single_completions(tokenizer, tmp_path, limit):
    path = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{i} ", "chosen": "yes", "rejected": "no"} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    shares = {"eval_fraction": 0.25}, {"eval_data": str(path)}
    for share, held_out in zip(shares, (4, 20), strict=True):
        config, stop_ids = SftConfig(data=str(path), **share), frozenset([tokenizer.eos_token_id])
        form = form_of_rows(UNPAIRED)
        rows = SftRows.read(config, tokenizer, stop_ids, form, max_evaluated=limit, seed=0)
        known = [item.prompt_T.tobytes() for item in rows.evaluated]
        assert len(known) == 2 * len(set(known)) == min(held_out, limit // 2 * 2)
        assert rows.num_held_out == held_out
        assert not {item.prompt_T.tobytes() for item in rows.learned} & set(known)


BAD = {
    "has no rejected": {"prompt": "a", "chosen": "b"},
    "chosen and rejected are the same": {"prompt": "a", "chosen": "b", "rejected": "b"},
    "has no prompt, and chosen and rejected have no common beginning": {"chosen": "b", "rejected": "c"},
    "chosen and rejected are neither two texts nor two lists of messages": {"chosen": "b", "rejected": 3},
    "chosen and rejected do not begin with the same prompt tokens": {
        "chosen": [USER, says("a")],
        "rejected": [USER, {"role": "user", "content": "?"}, says("b")],
    },
}


@pytest.mark.parametrize("reason", BAD)
def test_a_row_that_is_no_pair_is_left_out_with_its_reason(reason, tokenizer, tmp_path):
    rows = read(tokenizer, tmp_path, [BAD[reason], FORMS["texts"][0]])
    assert len(rows.learned) == 1
    assert f"1 left out (first: line 1 {reason})" in rows.notices[0]


def test_a_label_that_is_none_is_left_out_and_a_long_row_cut(tokenizer, tmp_path):
    row = {"prompt": "x ", "completion": "y" * 9, "label": 1}
    rows = read(tokenizer, tmp_path, [row, row | {"label": 0.5}], UNPAIRED, max_length=6)
    assert texts(tokenizer, rows) == [("x ", "yyyy")]
    assert "1 cut to 6 tokens" in rows.notices[0] and "label is 0.5" in rows.notices[0]


def test_columns_that_are_not_used_are_named(tokenizer, tmp_path):
    rows = read(tokenizer, tmp_path, [FORMS["texts"][0] | {"score_chosen": 3.5}])
    (line,) = rows.unused
    assert line.endswith("rows.jsonl: not used: column score_chosen (1 row)")


def test_a_pair_that_is_evaluated_is_not_learned(tokenizer, tmp_path):
    more = [{"prompt": f"{i}", "chosen": "b", "rejected": "c"} for i in range(4)]
    path = tmp_path / "held.jsonl"
    path.write_text(json.dumps(more[1]) + "\n")
    rows = read(tokenizer, tmp_path, more, eval_data=str(path))
    assert len(rows.learned) == 3 and len(rows.evaluated) == 1


def test_a_table_without_the_columns_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"need columns chosen and rejected.* columns are question, answer"):
        read(tokenizer, tmp_path, [{"question": "a", "answer": "b"}])


def singles(count):
    return [{"prompt": f"{i} ", "completion": f"c{i}", "label": i % 2} for i in range(count)]


@pytest.mark.parametrize(("order", "differs"), [("random", True), ("sequential", False)])
def test_the_batches_of_kto_are_the_same_in_every_epoch(order, differs, tokenizer, tmp_path):
    dpo = DpoConfig(loss_type=("kto",), order=order)
    rows = read(tokenizer, tmp_path, singles(8), dpo)
    first, second = ([list(rows.items(e * 2 + step, 4)) for step in range(2)] for e in range(2))
    assert first == second and ([*first[0], *first[1]] != list(range(8))) == differs
    of_pairs = [{"prompt": f"{i} ", "chosen": "a", "rejected": "b"} for i in range(8)]
    rows = read(tokenizer, tmp_path, of_pairs, DpoConfig(loss_type=("sigmoid",), order=order))
    assert (list(rows.items(0, 8)) != list(rows.items(1, 8))) == differs


def test_a_mismatched_completion_is_of_the_nearest_row_before_with_another_prompt(tokenizer, tmp_path):
    rows = [*singles(3), {"prompt": "2 ", "completion": "d", "label": 1}]
    batch = dict(enumerate(read(tokenizer, tmp_path, rows, UNPAIRED).learned))
    made = [
        (g.prompt.index, tokenizer.decode(g.prompt.tokens_T), tokenizer.decode(g.samples_G[0].tokens_T[:-1]))
        for g in mismatched(batch, 10)
    ]
    assert made == [(10, "0 ", "d"), (11, "1 ", "c0"), (12, "2 ", "c1"), (13, "2 ", "c1")]
    assert mismatched({2: batch[2], 3: batch[3]}, 10) == []
