"""The studies of real models with few seeds: their rows, their figures and the page of verdicts."""

import dataclasses
import json
from collections import Counter

import pytest

import tiny_run
from qerl.errors import UserError
from studies import real_rows
from studies.analysis import judge, values_of
from studies.catalog import STUDIES
from studies.catalog_real import REAL_STUDIES
from studies.catalog_real_more import MORE_STUDIES
from studies.real_findings import MODELS, ROWS, real_findings
from studies.select_problems import SelectOptions, select_problems
from studies.study import with_fields

TINY = {
    "num_steps": 1,
    "num_prompts": 2,
    "num_generations": 2,
    "adapter.rank": 4,
    "model.dtype": "fp32",
    "task.num_held_out": 2,
    "task.reward_workers": 1,
    "sample.max_tokens": 8,
    "engine.kv_cache_gb": 0.1,
    "evaluate.num_prompts": 2,
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    tiny_run.write_model(folder / "Qwen2.5-Coder-0.5B-Instruct", max_positions=1024)
    (folder / "Qwen2.5-Coder-1.5B-Instruct").symlink_to(folder / "Qwen2.5-Coder-0.5B-Instruct")
    for split in ("train", "test"):
        levels = ["Level 1", "Level 3", "Level 4", "Level 5", "Level 2", "Level 3"]
        rows = [
            {"problem": f"{split} {i}\u2028", "answer": str(i), "level": level}
            for i, level in enumerate(levels)
        ]
        write(folder / "math" / f"{split}.jsonl", rows)
    tasks = [
        {"text": f"Write f{i}.", "code": "", "task_id": i, "test_list": [f"assert f{i}() == {i}"]}
        for i in (10, 11, 12, 510, 511, 600, 601, 700, 974, 975)
    ]
    write(folder / "mbpp" / "mbpp.jsonl", tasks)
    human = {"prompt": "def f():\n", "canonical_solution": "", "entry_point": "f"}
    write(
        folder / "humaneval" / "humaneval.jsonl", [human | {"test": "def check(f):\n    assert f() == 1\n"}]
    )
    return folder


@pytest.fixture
def solved(tmp_path, monkeypatch):
    path = tmp_path / "solved.jsonl"
    monkeypatch.setattr(real_rows, "SOLVED", path)
    return path


def ids(path, key):
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


def test_no_studys_page_has_a_figure_twice():
    for name, make in STUDIES.items():
        counts = Counter(metric.key for metric in make().metrics)
        assert max(counts.values()) == 1, (name, counts.most_common(3))


def test_the_parts_of_mbpp_are_those_of_its_authors(files, tmp_path):
    train, test = (real_rows.write_rows(f"mbpp/{split}", files, tmp_path) for split in ("train", "test"))
    assert ids(train, "task_id") == [601, 700, 974] and ids(test, "task_id") == [11, 12, 510]
    with pytest.raises(UserError, match="there are no rows mbpp/x; there are mbpp/train"):
        real_rows.write_rows("mbpp/x", files, tmp_path)


def test_problems_that_are_solved_one_to_four_times_are_taken(files, solved, tmp_path):
    empty = real_rows.solved_names()
    with pytest.raises(UserError, match="choose them by `python -m studies select --files"):
        real_rows.write_rows(empty[0], files, tmp_path)
    lines = [("train", 1, 0), ("train", 2, 1), ("train", 3, 4), ("train", 5, 5), ("test", 3, 2)]
    lines += [("test", 1000 + i, 3) for i in range(200)]
    write(solved, [dict(zip(("split", "row", "solved"), line, strict=True)) for line in lines])
    assert real_rows.solved_rows()["train"] == [2, 3]
    assert real_rows.solved_rows()["test"] == [3, *range(1000, 1127)]
    names = real_rows.solved_names()
    assert names[0] != empty[0]  # and so is the digest of a run
    assert ids(real_rows.write_rows(names[0], files, tmp_path), "answer") == ["2", "3"]


def test_a_selection_tries_hard_problems_once(files, solved, monkeypatch, capsys):
    tiny = with_fields(MORE_STUDIES["math_exploration"]().base, TINY)
    study = dataclasses.replace(MORE_STUDIES["math_exploration"](), base=tiny)
    monkeypatch.setattr("studies.select_problems.math_exploration", lambda: study)
    monkeypatch.setattr("studies.select_problems.NUM_SAMPLES", 2)
    few = SelectOptions(files=files, num_train=2, num_test=1, chunk=1, out=solved)
    select_problems(few)
    first = [json.loads(line) for line in solved.read_text().splitlines()]
    assert [line["split"] for line in first] == ["train", "train", "test"]
    assert {line["row"] for line in first} <= {1, 2, 3, 5} and all(0 <= l["solved"] <= 2 for l in first)
    select_problems(dataclasses.replace(few, num_train=9, num_test=9))
    lines = [json.loads(line) for line in solved.read_text().splitlines()]
    assert lines[:3] == first
    assert sorted((line["split"], line["row"]) for line in lines) == [
        (split, row) for split in ("test", "train") for row in (1, 2, 3, 5)
    ]


@pytest.mark.parametrize("name, arm", [("math_exploration", "deep_grpo"), ("mbpp", "nvfp4+aqn")])
def test_a_line_has_the_figures_of_its_page(name, arm, files, solved, tmp_path):
    write(solved, [{"split": split, "row": r, "solved": 2} for split in ("train", "test") for r in (1, 2, 3)])
    study = MORE_STUDIES[name]()
    fields = {key: value for key, value in TINY.items() if name != "mbpp" or "reward" not in key}
    study = dataclasses.replace(study, base=with_fields(study.base, fields), files=files)
    job = study.job(study.tasks[0], next(a for a in study.arms if a.name == arm), 0, None, tmp_path)
    line = study.measure(job)
    derived = {"mismatch_kl", "mismatch_abs", "rollout_s", "step_s"}
    assert derived <= set(line["curve"][0])
    shown = {metric.key for metric in study.metrics} - derived - {"matched"}
    assert shown <= set(line["final"]) | {"accuracy_before", "accuracy_after", "greedy_after"}
    prefix = "math" if name == "math_exploration" else "humaneval"
    k = 64 if name == "math_exploration" else 8
    assert 0 <= line["final"][f"{prefix}_pass@1"] <= line["final"][f"{prefix}_pass@{k}"] <= 1


def test_rows_of_files_need_their_folder(tmp_path):
    study = MORE_STUDIES["mbpp"]()
    with pytest.raises(UserError, match="study mbpp needs --files"):
        study.measure(study.job(study.tasks[0], study.arms[0], 0, None, tmp_path))


def test_every_claim_of_the_table_is_one_of_its_study():
    for _, places in ROWS:
        assert len(places) <= len(MODELS)
        for study, *claim in filter(None, places):
            claims = [[c.arm, c.against, c.metric] for c in STUDIES[study]().claims]
            assert claim in claims, (study, claim)


def lines_of(task, values, num_seeds):
    """A line of each arm and seed, greedy accuracies by arm."""
    return [
        {
            "task": task,
            "arm": arm,
            "seed": seed,
            "final": {"greedy": value + seed / 100},
            "curve": [],
            "workers": 1,
        }
        for arm, value in values.items()
        for seed in range(num_seeds)
    ]


def table_of(lines):
    """The rows of the table by claim: their cells. lines: by study."""
    results = [(study, judge(study, lines[study.name])) for study in (REAL_STUDIES[name]() for name in lines)]
    rows = [row for row in real_findings(results, lines).splitlines() if row.startswith("| ")]
    return {
        cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    }


def test_a_cell_has_the_verdict_and_the_difference_of_its_study():
    values = {"bf16": 0.5, "nvfp4": 0.4, "nvfp4+aqn": 0.6, "bf16+aqn": 0.5}
    rows = table_of({"gsm8k_small": lines_of("gsm8k-0.5b", values, 9)})
    assert rows["claim"] == [*MODELS, "both sizes"]
    cell = "**reproduced** +0.1, p = 0.012, n = 9"  # no interval, as all pairs differ alike
    assert rows["NVFP4 + AQN ends above BF16 LoRA"] == ["not run", cell, "not run", ""]
    assert rows["NVFP4 has a higher entropy than BF16"] == ["not run", "not run", "not run", ""]
    noisy = rows["AQN raises what BF16 LoRA ends at"]
    assert noisy[0] == "" and noisy[1].startswith("**not shown** +0, p = 1")


def test_pairs_of_both_sizes_decide_what_those_of_one_cannot():
    small = lines_of("gsm8k-0.5b", {"bf16": 0.3, "nvfp4+aqn": 0.2}, 5)
    large = lines_of("gsm8k-1.5b", {"bf16": 0.7, "nvfp4+aqn": 0.6}, 3)
    rows = table_of({"gsm8k_small": small, "gsm8k": large})
    of_small, of_large, of_both = rows["NVFP4 + AQN ends above BF16 LoRA"][1:]
    assert of_small.startswith("**not shown** -0.1, p = 0.062") and of_large.startswith("**not shown**")
    assert of_both == "**refuted** p = 0.0078, n = 5 + 3"  # 2 / 2 ** 8
    opposite = lines_of("gsm8k-1.5b", {"bf16": 0.6, "nvfp4+aqn": 0.7}, 3)
    rows = table_of({"gsm8k_small": small, "gsm8k": opposite})
    assert rows["NVFP4 + AQN ends above BF16 LoRA"][3] == "**depends on the task** p = 0.73, n = 5 + 3"


def test_seconds_of_two_sizes_are_not_judged_together():
    def line(task, arm, step_s):
        point = {
            "step": 0,
            "reward": 0.5,
            "elapsed_s": step_s,
            "step_s": step_s,
            "rollout_s": 0.5,
            "memory_gb": 1.0,
        }
        final = {"train_s": step_s, "peak_gb": 1.0}
        return {"task": task, "arm": arm, "seed": 0, "final": final, "curve": [point], "workers": 1}

    tasks = {"gsm8k_small": "gsm8k-0.5b", "gsm8k": "gsm8k-1.5b"}
    lines = {name: [line(task, "bf16", 2.0), line(task, "nvfp4+aqn", 1.0)] for name, task in tasks.items()}
    row = table_of(lines)["A step of NVFP4 + AQN takes less time than one of BF16 LoRA"]
    assert [cell.partition(",")[0] for cell in row] == ["", "**not shown** -1", "**not shown** -1", ""]


def test_the_mismatch_of_a_run_is_the_mean_of_its_steps():
    curve = [{"step": 0, "mismatch_kl": 0.1}, {"step": 1}, {"step": 2, "mismatch_kl": 0.4}]
    common = {"task": "t", "arm": "a", "final": {}, "workers": 1}
    lines = [common | {"seed": seed, "curve": curve[seed:]} for seed in (0, 1)]
    assert values_of(lines, "mismatch_kl") == {("t", "a"): {0: pytest.approx(0.25), 1: 0.4}}
    assert values_of(lines, "rollout_s") == {}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("gsm8k_noise", {"none": "nvfp4", "sigma-x1": "nvfp4+aqn"}),
        ("gsm8k_rank", {"bf16-r32-x1": "bf16", "nvfp4-r32-x1": "nvfp4"}),
        ("gsm8k_systems", {"bf16": "bf16", "nvfp4": "nvfp4", "nvfp4+aqn": "nvfp4+aqn"}),
    ],
)
def test_runs_of_gsm8k_small_serve_the_studies_of_its_model(name, taken, tmp_path):
    study, lender = STUDIES[name](), REAL_STUDIES["gsm8k_small"]()
    assert study.takes_from == lender.name and study.measure is lender.measure
    arms = {lender.job(lender.tasks[0], arm, 0, None, tmp_path).digest: arm.name for arm in lender.arms}
    jobs = [study.job(study.tasks[0], arm, 0, None, tmp_path) for arm in study.arms]
    assert {job.arm: arms[job.digest] for job in jobs if job.digest in arms} == taken
