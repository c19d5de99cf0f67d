"""A study from its definition to its page, with a tiny model on the CPU; a kill changes nothing of it."""

import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_study

import studies.run as run_module
import tiny_run
from faults.runs import Run
from qerl.errors import RunError, UserError
from qerl.tracking import is_timing
from studies.results import Results
from studies.run import best_rates, choice_jobs, execute, final_jobs, run_study
from studies.study import Arm, select, with_fields


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


RUNS = "runs/*/*/*/*"  # by task, arm, rate and seed; unlike rglob, glob looks into no folder that is renamed


def lines(folder, name="results"):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def untimed(value):
    """Without what differs from one execution to the next."""
    if isinstance(value, dict):
        return {
            k: untimed(v) for k, v in value.items() if not is_timing(k) and k not in ("seconds", "workers")
        }
    return [untimed(item) for item in value] if isinstance(value, list) else value


def forked(files, folder, workers=1, method="fork", **options):
    """The study in a forked process, whose workers are forked too: none imports torch again."""

    def work():
        run_module.get_context = lambda _: multiprocessing.get_context(method)
        run_study(tiny_study.make(files, **options), folder, workers=workers)

    log = folder.with_name(f"{folder.name}.log")
    return Run(tiny_run.forked(work, log, log), log)


def finish(run):
    assert run.wait(180) == 0, run.said
    run.wait_for_all()


@pytest.fixture(scope="module")
def unbroken(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies") / "whole"
    finish(forked(files, folder))
    return folder


def test_every_arm_and_seed_has_its_line_in_the_study_s_order(unbroken):
    found = lines(unbroken)
    assert [(line["task"], line["arm"], line["seed"]) for line in found] == [
        ("sums", arm, seed) for arm in ("bf16", "nvfp4") for seed in (0, 1)
    ]
    for line in found:
        assert line["study"] == "tiny" and line["device"] and line["seconds"] > 0
        assert [point["step"] for point in line["curve"]] == [0, 1]
        assert {"accuracy_before", "accuracy_after", "reward_first", "reward_mean"} <= set(line["final"])
        rewards = [point["reward"] for point in line["curve"]]
        assert line["final"]["reward_mean"] == pytest.approx(sum(rewards) / 2, rel=1e-5)


def test_rates_are_chosen_with_seeds_that_serve_for_nothing_else(unbroken):
    trials, finals = lines(unbroken, "choice"), lines(unbroken)
    assert {line["seed"] for line in trials} == {100} and {line["seed"] for line in finals} == {0, 1}
    for arm in ("bf16", "nvfp4"):
        scores = {t["learning_rate"]: t["final"]["accuracy_after"] for t in trials if t["arm"] == arm}
        assert set(scores) == {0.001, 0.01}
        best = max(sorted(scores), key=scores.__getitem__)
        assert {line["learning_rate"] for line in finals if line["arm"] == arm} == {best}


def test_the_page_and_the_summary_say_what_was_found(unbroken):
    page, summary = (unbroken / "index.html").read_text(), (unbroken / "summary.md").read_text()
    for text in (page, summary):
        assert "NVFP4 ends above BF16" in text and "nvfp4" in text and "2 pairs" in text
    assert "<svg" in page and "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert "Runs not made" not in page


def test_checkpoints_are_gone_and_the_rest_of_a_run_stays(unbroken):
    runs = [path.parent for path in (unbroken / "runs").rglob("result.json")]
    assert len(runs) == 8
    for folder in runs:
        assert not (folder / "checkpoints").exists() and (folder / "metrics.jsonl").exists()
        assert (folder / "log.txt").exists()


def test_notes_of_a_line_stand_where_its_figure_is_shown(files, tmp_path, capsys):
    study = tiny_study.make(files)
    job = study.job(study.tasks[0], study.arms[0], 0, 0.001, tmp_path)
    line = {"task": job.task, "arm": job.arm, "seed": 0, "learning_rate": 0.001, "digest": job.digest}
    line |= {"final": {study.metrics[0].key: 0.25}, "curve": [], "seconds": 3.2, "notes": ["2 of 9 failed"]}
    execute(study, [job], Results(tmp_path / "results.jsonl"), lambda jobs: iter([(jobs[0], line)]))
    assert capsys.readouterr().err.endswith(f"{study.metrics[0].key} 0.25 (3 s); 2 of 9 failed\n")
    assert lines(tmp_path)[0]["notes"] == ["2 of 9 failed"]


def test_runs_that_another_study_has_are_taken_and_the_page_says_so(files, unbroken, tmp_path, monkeypatch):
    shutil.copytree(unbroken, tmp_path / "tiny", ignore=shutil.ignore_patterns("runs"))
    of_bf16 = lines(unbroken)[:2]
    tiny = tiny_study.make(files)
    base = with_fields(tiny.base, {"learn.learning_rate": of_bf16[0]["learning_rate"]})
    plain = dataclasses.replace(tiny.arms[0], name="plain")
    arms = plain, Arm(name="noisy", fields={"noise.schedule": "linear"})
    study = dataclasses.replace(
        tiny, name="more", takes_from="tiny", base=base, rates=(), arms=arms, baseline="plain", claims=()
    )
    missing = []
    monkeypatch.setattr(run_module, "_outcomes", lambda *given: iter(missing.extend(given[-1]) or ()))
    run_study(study, tmp_path / "more")
    assert lines(tmp_path / "more") == [{**line, "arm": "plain"} for line in of_bf16]
    assert [(job.arm, job.seed) for job in missing] == [("noisy", 0), ("noisy", 1)]
    assert "2 of them are runs of the study tiny." in (tmp_path / "more" / "index.html").read_text()
    assert "of them are runs" not in (unbroken / "index.html").read_text()


@pytest.mark.slow
def test_killed_in_a_run_and_started_again_a_study_has_the_same_results(files, unbroken, tmp_path):
    for attempt in range(5):  # a run takes a tenth of a second, and may end before the signal
        folder = tmp_path / f"killed-{attempt}"
        run = forked(files, folder)
        under_way = folder / "runs" / "sums" / "bf16"
        run.wait_for(lambda under_way=under_way: list(under_way.glob("*/seed-1/checkpoints/step-*")))
        run.kill()
        if run.wait() == -signal.SIGKILL:
            break
    run.wait_for_all()
    before = lines(folder)
    assert 2 <= len(before) < 4
    finish(forked(files, folder, 2))
    assert untimed(lines(folder)) == untimed(lines(unbroken))
    assert untimed(lines(folder, "choice")) == untimed(lines(unbroken, "choice"))
    after = lines(folder)
    assert all(line in after for line in before)  # with their times: what was there was not run again


@pytest.mark.slow
def test_after_ctrl_c_no_further_run_begins(files, tmp_path):
    folder = tmp_path / "stopped"
    run = forked(files, folder, num_steps=50)  # so that none ends before the signal
    before = under_way(folder, run.wait_for)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal, which signals the group
    assert run.wait(60) != 0
    run.wait_for_all()
    assert under_way(folder) == before


@pytest.mark.slow
def test_after_a_signal_to_the_parent_alone_no_further_run_begins(files, tmp_path):
    """Its worker is spawned, as a study's are."""
    folder = tmp_path / "stopped"
    run = forked(files, folder, method="spawn", num_steps=50)
    before = under_way(folder, run.wait_for)
    run.kill(signal.SIGINT)
    assert run.wait(60) != 0
    run.wait_for_all()
    assert under_way(folder) == before


def under_way(folder, wait=None):
    """Return the files of runs begun and of runs ended; with wait, once one has a checkpoint."""
    if wait:
        wait(lambda: list(folder.glob(f"{RUNS}/checkpoints/step-*")))
    return set(folder.glob(f"{RUNS}/metrics.jsonl")), set(folder.glob(f"{RUNS}/result.json"))


def test_a_finished_study_runs_nothing(files, unbroken):
    before = (unbroken / "results.jsonl").read_text()
    finish(forked(files, unbroken))
    assert (unbroken / "results.jsonl").read_text() == before


def test_the_order_of_lines_is_the_study_s_whichever_run_ends_first(files, tmp_path):
    study = tiny_study.make(files)
    jobs = final_jobs(study, tmp_path, {("sums", "bf16"): 0.01, ("sums", "nvfp4"): 0.01})
    results = Results(tmp_path / "results.jsonl")
    for job in reversed(jobs):
        line = {"task": job.task, "arm": job.arm, "seed": job.seed, "learning_rate": job.rate}
        results.add(job, line | {"digest": job.digest}, jobs)
    assert [(line["arm"], line["seed"]) for line in lines(tmp_path)] == [(j.arm, j.seed) for j in jobs]


def test_a_line_of_another_config_is_refused(files, tmp_path):
    study = tiny_study.make(files)
    job = final_jobs(study, tmp_path, {("sums", "bf16"): 0.01})[0]
    line = {"task": job.task, "arm": job.arm, "seed": job.seed, "learning_rate": job.rate, "digest": "other"}
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match="sums, bf16, seed 0 was run with another config"):
        Results(tmp_path / "results.jsonl").of(job)


def test_an_arm_that_was_not_tried_to_the_end_has_no_rate_yet(files, tmp_path):
    study = tiny_study.make(files)
    trials = choice_jobs(study, tmp_path)
    choice = Results(tmp_path / "choice.jsonl")
    for job in trials[:-1]:
        line = {"task": job.task, "arm": job.arm, "seed": job.seed, "learning_rate": job.rate}
        score = 0.5 if job.arm == "bf16" else 0.1
        choice.add(job, line | {"digest": job.digest, "final": {"accuracy_after": score}}, trials)
    assert best_rates(study, trials, choice) == {("sums", "bf16"): 0.001}  # the smaller of equals


def test_a_run_that_fails_ends_the_study_with_its_name(files, tmp_path):
    run = forked(files, tmp_path / "bad", template="{nothing}")
    assert run.wait() != 0
    assert re.search(r"RunError: sums, bf16, seed 100: UserError: .*nothing.*log\.txt", run.said)


@pytest.mark.parametrize(("wrong", "num_done"), [({1}, 9), ({0, 1}, 8), (set(range(10)), 0)], ids=str)
def test_the_others_go_on_after_up_to_two_failed_runs(files, tmp_path, monkeypatch, capsys, wrong, num_done):
    study = dataclasses.replace(tiny_study.make(files), seeds=tuple(range(10)))
    jobs = [job for job in final_jobs(study, tmp_path, {("sums", "bf16"): 0.01}) if job.arm == "bf16"]

    def work(measure, sharing, job):
        if job.seed in wrong:
            raise ValueError(f"seed {job.seed} is wrong")
        return {"seed": job.seed}

    monkeypatch.setattr(run_module, "_work", work)
    done = []
    with ThreadPoolExecutor(1) as pool, pytest.raises(RunError, match=f"seed {min(wrong)} is wrong"):
        for job, line in run_module._outcomes(pool, study, 1, jobs):
            done.append((job.seed, line["seed"]))
    assert len(done) == num_done and all(a == b for a, b in done)
    assert capsys.readouterr().err.count("is wrong") == min(len(wrong), 3)


def test_more_seeds_than_the_exact_test_can_count_are_refused_before_a_run(files):
    study = tiny_study.make(files)
    assert len(select(study, seeds=40, arms=(), tasks=()).seeds) == 40
    with pytest.raises(UserError, match=r"41 seeds of 1 tasks make 41 pairs, .* takes at most 40"):
        select(study, seeds=41, arms=(), tasks=())


@pytest.mark.parametrize("named, workers, sharing", [("0,1", 2, 1), ("0,1", 3, 2), ("0", 3, 3), ("", 2, 2)])
def test_a_line_counts_the_runs_that_share_its_device(monkeypatch, named, workers, sharing):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert run_module.runs_on_a_device(workers) == sharing


def _gpu_of_worker(number):
    time.sleep(0.2)  # so that every worker of the pool gets a job
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("named, counts", [("3,5", [2, 2]), ("", [4])])
def test_workers_take_the_visible_gpus_in_turn(monkeypatch, named, counts):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(run_module, "get_context", lambda _: multiprocessing.get_context("fork"))
    with run_module._pool(4) as pool:
        gpus = dict(pool.map(_gpu_of_worker, range(8)))
    assert sorted(Counter(gpus.values()).values()) == counts
    assert set(gpus.values()) == set(named.split(","))
