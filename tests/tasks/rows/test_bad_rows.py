"""A row that no prompt can be made of is found before the first step, counted and left out."""

import json
import math

import datasets
import pyarrow.parquet
import pytest

from material import CHATML, jsonl, tokenizer
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks import Task, all_prompts
from qerl.tasks.rows.values import MAX_DEPTH, value_fault

TOKENIZER = tokenizer()
HALF = "\ud83d"  # of an emoji whose other half was cut off
GOOD = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(8)]
TALK = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": i} for i in range(8)]


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


def built(config, *, made=TOKENIZER, **settings):
    return Task(config, made, seed=0, max_prompt_tokens=120, **settings)


def left_out(config, *, made=TOKENIZER):
    """Return the notice, after each row of two epochs was drawn; no bad row is among them."""
    task = built(config, made=made)
    (line,) = task.notices(config, reads_answer=False)
    drawn = [prompt.index for step in range(8) for prompt in task.train_prompts(step, 2)]
    assert set(drawn).isdisjoint(task.renderers[0].faults) and len(set(drawn)) >= 6
    assert task.take_faults() == []  # they were known before
    with pytest.raises(UserError, match="1 of 9 rows cannot be used"):
        built(config, made=made, strict=True)
    return line


def with_bad(tmp_path, good, bad, **changes):
    rows = [*good[:3], bad, *good[3:]]
    return TaskConfig(name=jsonl(tmp_path / "x.jsonl", rows), num_held_out=1, **changes)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prompt": f"1 {HALF} 2", "answer": "3"}, "'prompt' is not valid Unicode"),
        ({"prompt": "1 + 2", "answer": HALF}, "'answer' is not valid Unicode"),
        ({"prompt": "1 + 2", "answer": "3", "more": [{"a": HALF}]}, "'more' is not valid Unicode"),
        ({"prompt": "1 + 2", HALF: "3"}, "'\\ud83d' is not a valid column name"),
        ({"prompt": "1 + 2", "answer": nested(900)}, f"nests lists or objects more than {MAX_DEPTH} deep"),
        ({"prompt": "1 + 2", "answer": "3", "x": {"y": nested(MAX_DEPTH)}}, f"more than {MAX_DEPTH} deep"),
        ({"prompt": nested(900), "answer": "3"}, f"more than {MAX_DEPTH} deep"),
        ({"prompt": None, "answer": "3"}, "has no prompt"),
        ({"answer": "3"}, "has no prompt"),
        ({"prompt": float("nan")}, "'prompt' is nan, not a finite number; write null for a missing one"),
        ({"prompt": "1 + 2", "answer": float("nan")}, "'answer' is nan, not a finite number"),
        ({"prompt": "1 + 2", "answer": "3", "x": -float("inf")}, "'x' is -inf, not a finite number"),
        ({"prompt": "1 + 2", "x": [{"y": [1.0, float("inf")]}]}, "'x' has a number that is not a finite"),
        ({"prompt": 3}, "prompt is a number, not a text"),
        ({"prompt": True}, "prompt is true or false, not a text"),
        ({"prompt": {"role": "user", "content": "x"}}, "prompt is an object, not a text"),
        ({"prompt": TALK[0]["prompt"]}, "prompt is a list, not a text"),
    ],
)
def test_a_bad_row_among_texts_is_left_out(tmp_path, bad, said):
    line = left_out(with_bad(tmp_path, GOOD, bad))
    assert "of 9 rows 1 unusable and left out (line 4: " in line and said in line


@pytest.mark.parametrize(
    ("talk", "said"),
    [
        ("2?", "prompt is a text, not a list of messages"),
        ([], "prompt has no message"),
        (["hello"], "message 1 of prompt is a text, not an object with role and content"),
        ([{"content": "2?"}], "message 1 of prompt: role is missing, not a text"),
        ([{"role": "user"}], "message 1 of prompt: content is missing, not a text"),
        ([{"role": 1, "content": "2?"}], "message 1 of prompt: role is a number, not a text"),
        ([{"role": "user", "content": 5}], "message 1 of prompt: content is a number, not a text"),
        ([{"role": "user", "content": ["part"]}], "content of message 1 of prompt: a part is not a text"),
        ([TALK[0]["prompt"][0], {"role": "user", "content": HALF}], "'prompt' is not valid Unicode"),
        ([{"role": "critic", "content": "2?"}], "rejects messages of critic: no critic"),
    ],
)
def test_a_bad_row_among_conversations_is_left_out(tmp_path, talk, said):
    check = "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critic') }}{% endif %}"
    config = with_bad(tmp_path, TALK, {"prompt": talk, "answer": "3"})
    line = left_out(config, made=tokenizer(f"{check}{{% endfor %}}{CHATML}"))
    assert "of 9 rows 1 unusable and left out (line 4: " in line and said in line


@pytest.mark.parametrize("text", ['{"prompt": "1 + 2"', "[1]", '{"prompt": "a", "prompt": "b"}', "[" * 5000])
def test_a_line_that_cannot_be_read_is_left_out(tmp_path, text):
    lines = [json.dumps(row) for row in GOOD]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines[:3], "", text, *lines[3:]]))
    line = left_out(TaskConfig(name=str(tmp_path / "x.jsonl"), num_held_out=1))
    assert "of 9 rows 1 unusable and left out (line 5: " in line


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", '[0, {"a": -1e400}]'])
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_number_that_is_not_finite_costs_its_row(tmp_path, number, ending):
    lines = [json.dumps(row) for row in GOOD]
    lines = [*lines[:3], f'{{"prompt": "1 + 2 =", "answer": "3", "more": {number}}}', *lines[3:]]
    text = "\n".join(lines) if ending == ".jsonl" else f"[{','.join(lines)}]"
    (path := tmp_path / f"x{ending}").write_text(text)
    line = left_out(TaskConfig(name=str(path), num_held_out=1))
    assert line.startswith(f"{path}: of 9 rows 1 unusable and left out (") and " 4: 'more' " in line


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0.0, math.nan], pyarrow.float32()),
        ([0.0, -math.inf], pyarrow.float16()),
        ([[0.0], [1.0, math.inf]], pyarrow.list_(pyarrow.float64())),
        ([[0.0, 1.0], [1.0, math.nan]], pyarrow.list_(pyarrow.float32(), 2)),
        ([None, {"a": [{"b": math.nan}]}], None),
        ([[], [("a", math.nan)]], pyarrow.map_(pyarrow.string(), pyarrow.float64())),
    ],
)
def test_a_number_of_a_parquet_file_that_is_not_finite_costs_its_row(tmp_path, values, kind):
    good, bad = values
    rows = [*GOOD[:3], GOOD[0], *GOOD[3:]]
    table = pyarrow.table({name: [row[name] for row in rows] for name in ("prompt", "answer")})
    more = pyarrow.array([good] * 3 + [bad] + [good] * 5, type=kind)
    pyarrow.parquet.write_table(table.append_column("more", more), path := tmp_path / "x.parquet")
    assert f"{path}: of 9 rows 1 unusable and left out (row 4: 'more' " in left_out(
        TaskConfig(name=str(path), num_held_out=1)
    )


def test_missing_numbers_of_a_parquet_file_cost_no_row(tmp_path):
    table = pyarrow.table({"prompt": [row["prompt"] for row in GOOD], "more": [None, 1.5] * 4})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    task = built(TaskConfig(name=str(tmp_path / "x.parquet"), num_held_out=1))
    assert task.renderers[0].faults == {}


def test_a_csv_row_with_too_many_values_is_left_out(tmp_path):
    lines = [f"{row['prompt']},{row['answer']}\n" for row in GOOD]
    (tmp_path / "x.csv").write_text("prompt,answer\n" + "".join([*lines[:3], "1, 2, 3\n", *lines[3:]]))
    assert "(line 5: has more values" in left_out(TaskConfig(name=str(tmp_path / "x.csv"), num_held_out=1))


@pytest.mark.parametrize("column", ["prompt", "answer"])
def test_bytes_of_a_parquet_file_that_are_not_utf_8_cost_their_row(tmp_path, column):
    rows = [*GOOD[:3], {"prompt": "bad", "answer": "bad"}, *GOOD[3:]]
    values = {name: [row[name].encode() for row in rows] for name in ("prompt", "answer")}
    values[column][3] = b"caf\xe9"
    arrays = {name: pyarrow.array(each).view(pyarrow.string()) for name, each in values.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), tmp_path / "x.parquet")
    line = left_out(TaskConfig(name=str(tmp_path / "x.parquet"), num_held_out=1))
    assert f"(row 4: '{column}' is not valid Unicode)" in line


def test_most_rows_decide_what_the_prompt_column_holds(tmp_path):
    numbers = [{"n": i} for i in range(5)]
    config = with_bad(tmp_path, numbers, {"n": "six"}, prompt_column="n", template="Count to {n}.")
    task = built(config)
    assert task.held_out(1)[0].text.endswith("Count to 4.<|im_end|>\n<|im_start|>assistant\n")
    assert task.renderers[0].faults == {3: "n is a text, not a number"}
    rows = [{"prompt": "2?"}, *TALK]
    task = built(TaskConfig(name=jsonl(tmp_path / "x.jsonl", rows), num_held_out=1))
    assert list(task.renderers[0].faults) == [0]
    rows = [*[{"prompt": None}] * 3, *[{"prompt": {}}] * 3, *GOOD[:2]]
    task = built(TaskConfig(name=jsonl(tmp_path / "x.jsonl", rows), num_held_out=1))
    assert list(task.renderers[0].faults) == list(range(6))


def test_a_prompt_without_a_token_is_left_out(tmp_path):
    plain = tokenizer(chat_template=None)
    plain.backend_tokenizer.post_processor = None  # no <bos>
    config = with_bad(tmp_path, GOOD, {"prompt": "", "answer": "3"})
    assert "(line 4: its prompt has no token)" in left_out(config, made=plain)


def test_a_data_set_of_bad_rows_is_refused_with_the_first(tmp_path):
    config = TaskConfig(name=jsonl(tmp_path / "x.jsonl", [{"prompt": None}] * 3), num_held_out=1)
    with pytest.raises(UserError) as error:
        built(config)
    message = "3 of 3 rows cannot be used: line 1: has no prompt; line 2: has no prompt; ..."
    assert str(error.value).endswith(message)


def test_a_template_that_fits_no_generated_row_is_refused_at_once():
    config = TaskConfig(num_rows=10**12, template="{metadata[expresion]}")
    with pytest.raises(UserError, match=r"128 of 128 rows .* row 1: task\.template .*KeyError: 'expresion'"):
        built(config)


def test_a_benchmark_with_a_bad_row_is_refused(tmp_path):
    config = with_bad(tmp_path, GOOD, {"prompt": f"1 {HALF}", "answer": "3"})
    with pytest.raises(UserError, match="line 4: 'prompt' is not valid Unicode"):
        all_prompts(config, TOKENIZER, num=None, max_prompt_tokens=120)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub data set whose row 200 has half a surrogate pair among the good ones."""
    values = [f"{i} + 1 =".encode() for i in range(300)]
    values[200] = b"caf\xe9"
    table = pyarrow.table({"prompt": pyarrow.array(values).view(pyarrow.string())})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset(table))
    return TaskConfig(name="someone/sums", num_held_out=4)


def test_a_bad_row_of_the_hub_is_left_out_when_it_is_drawn(hub):
    task = built(hub)
    assert task.notices(hub, reads_answer=False) == [] and task.num_bad == 0
    drawn = {prompt.index for prompt in task.train_prompts(0, 295)}
    assert drawn == set(range(296)) - {200} and task.num_bad == 1
    assert task.take_faults() == ["someone/sums (train): left out row 201: 'prompt' is not valid Unicode"]
    assert task.take_faults() == []


def test_a_bad_row_of_the_hub_is_an_error_when_it_is_drawn_under_strict(hub):
    task = built(hub, strict=True)
    with pytest.raises(UserError, match="row 201: 'prompt' is not valid Unicode"):
        task.train_prompts(0, 295)


def test_values_nest_as_deep_as_allowed_and_brackets_in_texts_do_not_count():
    assert value_fault({"a": nested(MAX_DEPTH)}) is None
    assert value_fault({"a": nested(MAX_DEPTH + 1)}) is not None
    assert value_fault({"a": nested(5000)}) is not None  # deeper than Python recurses
    assert value_fault({"a": ["[{" * 500]}) is None
