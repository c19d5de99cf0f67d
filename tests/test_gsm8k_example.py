"""examples/gsm8k.py trains on a file or on the hub's rows, whose answers its reward reads alike."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

import tiny_run
from qerl.tasks.rows import table
from qerl.tasks.rows.table import open_rows

EXAMPLE = Path(__file__).parents[1] / "examples" / "gsm8k.py"
TINY = ["--steps", "2", "--prompts", "2", "--samples", "2", "--max-tokens", "5", "--evaluate", "4"]
ROWS = [
    {"question": f"Tom has {i} apples and buys 2. How many?", "answer": f"{i} + 2\n#### {1000 + i:,}"}
    for i in range(40)
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("gsm8k_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("2 + 3 = 5, so the answer is 5.", "It is 2 + 3.\n#### 5", 1.0),
        ("5 is not the answer, 6 is.", "5", 0.0),
        ("That makes $1,234.00", "#### 1,234", 1.0),
        ("-7", "-7", 1.0),
        ("no idea", "5", 0.0),
    ],
)
def test_the_last_number_of_the_reply_counts(example, reply, answer, reward):
    completions = [[{"role": "assistant", "content": reply}]] * 2
    assert example.is_right(completions, [answer, "0"], question=["", ""]) == [reward, 0.0]


def test_it_trains_on_a_file_and_says_what_was_gained(tmp_path, monkeypatch, capsys):
    model, file = tiny_run.write_model(tmp_path / "model", max_positions=512), tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    out = tmp_path / "run"
    given = ["--rows", file, "--model", model, "--out", out, *TINY]
    monkeypatch.setattr(sys, "argv", ["gsm8k.py", *map(str, given)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    *_, before, after, export = capsys.readouterr().out.splitlines()
    assert before.startswith("held-out accuracy before: 0.") and after.startswith("held-out accuracy after: ")
    assert export.startswith(f"qerl export {out} ")
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8 and all(sample["reward"] == 0.0 for sample in samples)
    assert "apples and buys 2. How many?\n\nReason step by step" in samples[0]["prompt"]


def test_rows_of_the_hub_are_read_with_the_test_split_held_out(example, monkeypatch):
    asked = []

    def hub(name, split, *more):
        asked.append((name, split))
        given = {"name": name, "num_rows": 40, "columns": ("question", "answer"), "prompt_column": None}
        return table.RowTable(**given, get=ROWS.__getitem__, values=lambda column: [r[column] for r in ROWS])

    monkeypatch.setattr(table, "_hub", hub)
    monkeypatch.setattr(sys, "argv", ["gsm8k.py"])
    config = example.run_config(example.parse())
    train, held_out = open_rows(config.task)
    assert train.get(7)["answer"] == "1007" and held_out.num_rows == 40
    assert asked == [("openai/gsm8k:main", "train"), ("openai/gsm8k:main", "test")]
