"""The benchmark of the demo times a whole run and names the CPU; its committed rows hold the limits."""

import json
import platform
from pathlib import Path

import pytest

import tiny_run
from benchmarks import demo
from benchmarks.demo import DemoOptions, cpu_name, measure
from qerl.errors import RunError

ROOT = Path(__file__).parents[2]
ROWS = [json.loads(line) for line in (ROOT / "benchmarks/results/cpu/demo.jsonl").read_text().splitlines()]
ZEN_3, ZEN_4 = "AMD EPYC, family 25 model 1", "AMD EPYC, family 25 model 17"  # the first has no AVX-512
MAX_WALL_S = {(ZEN_4, "native"): 180, (ZEN_4, "avx2"): 300, (ZEN_3, "native"): 330}


def test_the_cpu_is_named_with_its_family():
    text = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"
    assert cpu_name(text) == "AMD EPYC, family 25 model 17"
    assert cpu_name("") == platform.machine()


def test_a_row_has_the_times_and_figures_of_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.os, "environ", demo.os.environ | tiny_run.child_variables())
    more = (*tiny_run.options(tiny_run.write_files(tmp_path), tmp_path / "run"), "--num-steps", "1")
    given = [*more[: more.index("--out")], *more[more.index("--out") + 2 :]]
    row = measure(DemoOptions(threads=1, instructions="avx2"), 3, tuple(given))
    assert (row["seed"], row["threads"], row["dtype"]) == (3, 1, "fp32")
    assert 0 <= row["train_s"] < row["wall_s"] and row["cpu_s"] > 0 and 0 <= row["accuracy_after"] <= 1


def test_a_run_that_fails_is_an_error_with_its_last_lines(monkeypatch):
    monkeypatch.setattr(demo.os, "environ", demo.os.environ | tiny_run.child_variables())
    with pytest.raises(RunError, match=r"ended with 2: .*num_steps"):
        measure(DemoOptions(), 0, ("--num-steps", "0"))


@pytest.mark.parametrize(("cpu", "instructions"), MAX_WALL_S)
def test_the_demo_learns_to_add_within_minutes_of_two_cores(cpu, instructions):
    wanted = ("demo", 2, cpu, instructions)
    names = "recipe", "threads", "cpu", "instructions"
    rows = [row for row in ROWS if tuple(row[name] for name in names) == wanted]
    assert {row["seed"] for row in rows} >= {0, 1, 2}
    for row in rows:
        assert row["wall_s"] <= MAX_WALL_S[cpu, instructions] and row["is_dirty"] is False
        assert row["accuracy_before"] < 0.25 and row["accuracy_after"] >= 0.6
