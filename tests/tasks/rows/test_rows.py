import json
import random

import datasets
import pytest

from material import SUMS, jsonl
from qerl.config import TaskConfig
from qerl.config.recipes.paper import GSM8K_TEMPLATE
from qerl.errors import UserError
from qerl.tasks.rows.table import file_sources, open_rows


def opened(**fields):
    return open_rows(TaskConfig(**fields))[0]


def refused(**fields) -> str:
    with pytest.raises(UserError) as error:
        opened(**fields)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_gym_task_of_sums_makes_sums():
    rows = opened(gym="basic_arithmetic", gym_options=SUMS)
    assert (rows.name, rows.num_rows) == ("reasoning-gym basic_arithmetic", 100_000)
    assert rows.columns == ("question", "answer", "metadata")
    for i in range(50):
        row = rows.get(i)
        x, y = row["metadata"]["expression"].split(" + ")
        assert 0 <= int(x) <= 100 and 0 <= int(y) <= 100
        assert row["answer"] == str(int(x) + int(y))
        assert row["question"] == f"Calculate {x} + {y}."


def test_gym_rows_are_generated_only_when_asked_for():
    assert opened(gym="list_functions", num_rows=600).get(599)  # it refuses rows beyond its size
    rows = opened(gym="chain_sum", num_rows=10**12)
    assert rows.get(10**12 - 1)["metadata"]["source_index"] == 10**12 - 1


def test_gym_rows_are_the_same_at_every_call_and_draw_nothing_from_the_global_generator():
    rows = opened(gym="list_functions", num_rows=40)  # a task that does draw from it
    before = random.getstate()
    first = [rows.get(i) for i in range(40)]
    assert random.getstate() == before
    random.seed(5)
    assert [rows.get(i) for i in reversed(range(40))] == first[::-1]


def test_a_gym_seed_among_the_options_gives_other_rows():
    one, other = opened(gym="chain_sum"), opened(gym="chain_sum", gym_options=(("seed", 1000),))
    assert one.get(0) == opened(gym="chain_sum").get(0)
    assert [one.get(i)["question"] for i in range(5)] != [other.get(i)["question"] for i in range(5)]


def test_a_wrong_gym_name_is_refused_with_near_ones():
    assert "did you mean basic_arithmetic" in refused(gym="basic_aritmetic")


def test_a_wrong_gym_option_is_refused_with_near_ones_and_all():
    message = refused(gym="chain_sum", gym_options=(("min_digit", 1),))
    assert "did you mean min_digits" in message and "allow_negation" in message and "size" not in message


def test_a_gym_option_out_of_range_is_refused_in_the_words_of_the_gym():
    assert "min_terms must be positive" in refused(gym="chain_sum", gym_options=(("min_terms", 0),))


def test_the_size_of_a_gym_task_is_set_by_num_rows_alone():
    assert "task.num_rows" in refused(gym="chain_sum", gym_options=(("size", 7),))


def test_gsm8k_keeps_the_number_alone_as_answer_and_its_template_asks_for_tags(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        row = {"question": "How many?", "answer": "He has 1,000 <<500*2>> and\nmore.\n#### 1,234"}
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows, apart = open_rows(TaskConfig(name="gsm8k", held_out_split="test"))
    splits = [(("openai/gsm8k", "main"), {"split": split}) for split in ("train", "test")]
    assert calls == splits
    row = rows.get(0)
    assert row["answer"] == "1234"
    assert (row["question"], row["solution"][-5:]) == ("How many?", "1,234")
    assert apart is not None and apart.get(0)["answer"] == "1234"
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in GSM8K_TEMPLATE


def test_a_folder_of_data_files_is_a_data_set_with_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sums"
    folder.mkdir()
    jsonl(folder / "train.jsonl", [{"prompt": "1 + 1", "answer": 2}, {"prompt": "1 + 2", "answer": None}])
    jsonl(folder / "test.jsonl", [{"prompt": "2 + 2", "answer": 4}])
    rows, apart = open_rows(TaskConfig(name=str(folder), held_out_split="test"))
    assert (rows.num_rows, rows.columns, rows.prompt_column) == (2, ("prompt", "answer"), "prompt")
    assert rows.get(1) == {"prompt": "1 + 2", "answer": None}
    assert apart is not None and apart.get(0) == {"prompt": "2 + 2", "answer": 4}
    assert "Unknown split" in refused(name=str(folder), split="validation")


def test_a_data_set_that_is_nowhere_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert "task.name" in refused(name=str(tmp_path / "nowhere"))
    assert "did you mean reasoning-gym" in refused(name="reasoning_gym")


def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(tmp_path):
    (tmp_path / "x.txt").write_text("1 + 1")
    assert "ends in .jsonl, .json, .parquet, .csv" in refused(name=str(tmp_path / "x.txt"))


def test_files_of_the_same_name_are_both_hashed(tmp_path):
    for name in "train", "test":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text(f'{{"prompt": "{name}"}}')
    places = [str(tmp_path / name / "x.jsonl") for name in ("train", "test")]
    before = file_sources(*places, None, "reasoning-gym", "")
    assert [*before] == ["rows of x.jsonl", "rows of x.jsonl'"]
    for name, place in zip(before, places, strict=True):
        (tmp_path / place).write_text('{"prompt": "other"}')
        after = file_sources(*places)
        assert after[name] != before[name]


def test_jsonl_rows_have_the_columns_of_all_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "b", "level": [2]}\n')
    rows = opened(name=str(path))
    assert (rows.num_rows, rows.columns) == (2, ("prompt", "answer", "level"))
    assert rows.get(1) == {"prompt": "b", "answer": None, "level": [2]}
    assert (rows.values("answer"), rows.values("level")) == ([1, None], [None, [2]])
    assert (rows.place(0), rows.place(1)) == ("line 1", "line 3")


@pytest.mark.parametrize(
    ("content", "place", "said"),
    [
        (
            b'{"prompt": "a"}\n{"prompt": "b"\n',
            "line 2",
            "invalid JSON: Expecting ',' delimiter at character 16",
        ),
        (b'{"prompt": "a"}\n\n\xff\xfe{}\n', "line 3", "invalid JSON: "),
        (b'{"prompt": "a"}\n[1]\n', "line 2", "not a JSON object but [1]"),
        (b'{"prompt": "a"}\n' + b"[" * 100_000, "line 2", "invalid JSON: "),
        (b'{"prompt": "a"}\n{"prompt": "b", "answer": 1, "prompt": "c"}', "line 2", "'prompt' twice"),
        (b'{"prompt": "a"}\n{"prompt": "b", "more": {"x": 1, "x": 2}}', "line 2", "'x' twice"),
        (b'{"prompt": "a"}\n{"prompt": ' + b"1" * 5000 + b"}", "line 2", "invalid JSON: "),
    ],
)
def test_a_line_that_is_no_object_is_a_fault_and_its_row_holds_nothing(tmp_path, content, place, said):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    rows = opened(name=str(path))
    ((index, fault),) = rows.faults.items()
    assert rows.place(index) == place and said in fault
    assert rows.columns == ("prompt",) and rows.get(index) == {"prompt": None}


def test_a_file_of_empty_lines_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\n \n")
    assert "x.jsonl: has no rows" in refused(name=str(tmp_path / "x.jsonl"))


def test_a_json_file_holds_a_list_of_objects(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    assert opened(name=str(path)).get(1) == {"prompt": "b"}
    path.write_text('[{"prompt": "a"}, 1, {"prompt": "b"}]')
    assert opened(name=str(path)).faults == {1: "not an object"}
    for content, said in (
        ("{}", "a list of objects"),
        ('[{"a": 1, "a": 2}]', "'a' twice"),
        ("[", "invalid JSON"),
        ("[]", "no rows"),
    ):
        path.write_text(content)
        assert said in refused(name=str(path))


def test_a_parquet_file_is_read(tmp_path):
    path = tmp_path / "x.parquet"
    table = datasets.Dataset.from_list([{"prompt": "a", "n": [1, 2]}, {"prompt": None, "n": [3]}])
    table.to_parquet(str(path))
    rows = opened(name=str(path))
    assert rows.get(0) == {"prompt": "a", "n": [1, 2]}
    assert rows.values("prompt") == ["a", None] and rows.place(1) == "row 2"
    path.write_text("not parquet")
    assert "not a readable parquet file" in refused(name=str(path))


def test_a_file_that_is_not_there_is_refused():
    assert "no such file" in refused(name="nowhere/x.jsonl")


def test_a_csv_has_its_columns_from_the_first_line_and_strings_for_values(tmp_path):
    path = tmp_path / "sums.csv"
    path.write_text('\ufeffprompt,answer\n"1, 2 or\n3?",3\nx,\n', encoding="utf-8")
    rows = opened(name=str(path))
    assert rows.columns == ("prompt", "answer") and rows.prompt_column == "prompt"
    assert [rows.get(i) for i in range(rows.num_rows)] == [
        {"prompt": "1, 2 or\n3?", "answer": "3"},
        {"prompt": "x", "answer": ""},
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"", ["has no rows"]),
        (b"prompt,answer\n", ["has no rows"]),
        (b"a,b,a\n1,2,3\n", ["has the column a twice"]),
        (b'a,b\n"1,2\n', ["not a readable CSV"]),
        (b"a,b\n\xff,2\n", ["not a readable CSV"]),
    ],
)
def test_a_damaged_csv_is_named(tmp_path, text, parts):
    path = tmp_path / "sums.csv"
    path.write_bytes(text)
    message = refused(name=str(path))
    assert "sums.csv" in message and all(part in message for part in parts)


def test_a_csv_row_with_more_values_than_columns_is_a_fault_with_its_line(tmp_path):
    (tmp_path / "x.csv").write_text('prompt,answer\n"a\nb",1\nc,d,2\ne,3\n')
    rows = opened(name=str(tmp_path / "x.csv"))
    assert rows.faults == {1: "has more values than the 2 columns"}
    assert [rows.place(i) for i in range(3)] == ["line 2", "line 4", "line 5"]
