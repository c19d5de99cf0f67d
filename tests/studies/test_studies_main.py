"""`python -m studies`: what it refuses, and what it runs."""

import pytest

from qerl.errors import UserError
from studies import __main__ as cli
from studies.catalog import STUDIES
from studies.run import choice_jobs
from studies.study import select


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["rnu"], "no command rnu"),
        (["run"], "run needs the name of a study, one of entropy, growth"),
        (["run", "grwth"], "no study grwth; did you mean growth"),
        (["run", "growth", "--arms", "nvfp5"], "study growth has no arm nvfp5; there are bf16, nvfp4"),
        (["run", "growth", "--seeds", "0"], "seeds"),
        (["run", "growth", "--part", "3/2"], "part: 3/2 must be I/N, such as 1/2"),
        (["run", "growth", "--part", "2"], "part: 2 must be I/N"),
        (["run", "growth", "--runs", "bf16"], "runs must be ARM:SEED, such as bf16:0, got bf16"),
        (["run", "growth", "--runs", "bf16:x"], "runs must be ARM:SEED"),
        (["run", "growth", "--runs", "bf61:0"], "no arm bf61; there are bf16"),
        (["run", "growth", "--runs", "bf16:0", "--seeds", "1"], "leave out --seeds, --arms and --part"),
    ],
)
def test_a_mistake_is_named(arguments, part):
    with pytest.raises(UserError, match=part):
        cli.main(arguments)


def test_a_part_of_a_study_runs_on_request(monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(cli, "run_study", lambda *a, **k: asked.append((a, k)) or tmp_path / "index.html")
    options = ["--seeds", "7", "--arms", "nf4", "--tasks", "add", "--workers", "3", "--out", str(tmp_path)]
    cli.main(["run", "growth", *options])
    ((study, folder), settings) = asked[0]
    assert (folder, settings) == (tmp_path / "growth", {"workers": 3})
    assert len(study.seeds) == 7 and len(study.arms) == 9
    jobs = [study.job(t, a, seed, 1e-3, tmp_path) for t in study.tasks for a in study.arms for seed in (1, 0)]
    runs = [(job.task, job.arm, job.seed) for job in study.runs_now(jobs)]
    assert runs == [("add", arm, seed) for seed in (0, 1) for arm in ("bf16", "nf4")]
    assert capsys.readouterr().out.endswith("index.html\n")


def test_the_parts_of_a_study_are_all_of_its_runs_once(tmp_path):
    study = STUDIES["gsm8k_small"]()
    jobs = [study.job(study.tasks[0], a, seed, 1e-3, tmp_path) for a in study.arms for seed in study.seeds]
    parts = [select(study, seeds=None, arms=(), tasks=(), part=(i, 3)).runs_now(jobs) for i in (1, 2, 3)]
    assert sorted(map(len, parts)) == [13, 13, 14]
    found = sorted((job.arm, job.seed) for part in parts for job in part)
    assert found == sorted((job.arm, job.seed) for job in jobs)
    assert all({job.seed for job in part} == set(study.seeds) for part in parts)


@pytest.mark.parametrize(
    ("run", "seeds"), [("bf16:99", r"\[0, 1, .*, 7\]"), ("bf16:1000", r"\[0, "), ("full:0", r"\[1000\]")]
)
def test_a_named_run_that_a_study_does_not_have_yet_is_one_line(run, seeds, tmp_path):
    """A rate of `full` is chosen first, by its trials with seed 1000."""
    arm = run.partition(":")[0]
    with pytest.raises(UserError, match=f"study gsm8k cannot run {run} now, of {arm} only seeds {seeds}"):
        cli.main(["run", "gsm8k", "--runs", run, "--out", str(tmp_path)])


def test_named_runs_are_run_alone_and_in_their_order(tmp_path):
    study = select(
        STUDIES["gsm8k"](), seeds=None, arms=(), tasks=(), only=(("nvfp4", 2), ("bf16", 0), ("full", 1000))
    )
    jobs = [study.job(study.tasks[0], a, seed, None, tmp_path) for a in study.arms for seed in study.seeds]
    assert [(job.arm, job.seed) for job in study.runs_now(jobs)] == [("nvfp4", 2), ("bf16", 0)]
    trials = choice_jobs(study, tmp_path)
    assert [job.rate for job in study.runs_now(trials)] == [1e-6, 3e-6, 1e-5]
