"""A study of a model of the hub, with a tiny one in its place, from local files."""

import dataclasses
import json
from pathlib import Path

import pytest

import tiny_run
from qerl.config.recipes import RECIPES
from qerl.errors import UserError
from qerl.tasks import VotePool
from qerl.training.policy import load_sampler
from qerl.types import Group, Prompt, Sample
from studies import real_models
from studies.analysis import DERIVED
from studies.catalog_real import REAL_STUDIES
from studies.real_models import (
    _accuracies,
    _votes,
    measure_before_training,
    strict,
    with_local_files,
)
from studies.run import best_rates, choice_jobs, final_jobs
from studies.study import select, with_fields

NAME = "Qwen2.5-Coder-0.5B-Instruct"
TINY = {
    "num_steps": 1,
    "num_prompts": 2,
    "num_generations": 2,
    "adapter.rank": 4,
    "task.num_held_out": 4,
    "task.reward_workers": 1,
    "sample.max_tokens": 8,
    "engine.kv_cache_gb": 0.1,
    "evaluate.num_prompts": 4,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    tiny_run.write_model(folder / NAME, max_positions=256)
    (folder / "gsm8k").mkdir()
    for split, num in (("train", 12), ("test", 6)):
        rows = [
            {"question": f"{split} {i}: {i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(num)
        ]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_job_reads_the_local_files_and_its_digest_names_those_of_the_hub(files, tmp_path):
    study = REAL_STUDIES["gsm8k_small"]()
    local = select(study, seeds=None, arms=(), tasks=(), files=files)
    job, other = (s.job(s.tasks[0], s.arms[1], 0, 5e-5, tmp_path) for s in (local, study))
    assert job.digest == other.digest and job.config == other.config
    assert job.config.model.path == f"Qwen/{NAME}"
    read = with_local_files(job.config, job.files)
    assert read.model.path == str(files / NAME)
    assert read.task.name == str(files / "gsm8k" / "train.jsonl")
    (files / f"{NAME.lower()}.gguf").touch()
    assert with_local_files(job.config, files).model.path == str(files / NAME)


def test_the_recipe_has_the_settings_of_the_study_but_for_memory():
    recipe, study = RECIPES["gsm8k_small"](), REAL_STUDIES["gsm8k_small"]()
    (arm,) = (arm for arm in study.arms if arm.name == "nvfp4-gptq")
    of_study = with_fields(study.base, arm.fields)
    assert recipe.model.block_scales == of_study.model.block_scales == "mse"
    same = {
        "model.scales": "mse",  # what auto is here
        "learn.max_tokens_per_microbatch": of_study.learn.max_tokens_per_microbatch,
        "task.reward_workers": of_study.task.reward_workers,  # of this machine
    }
    assert with_fields(recipe, same) == dataclasses.replace(of_study, out=recipe.out, engine=recipe.engine)
    larger = REAL_STUDIES["gsm8k"]().base
    assert with_fields(of_study, {"model.path": larger.model.path, **dict(arm.fields)}) == with_fields(
        larger, arm.fields
    )


def test_a_missing_file_is_named(files, tmp_path):
    config = REAL_STUDIES["gsm8k"]().base
    with pytest.raises(UserError, match=r"no .*Qwen2.5-Coder-1.5B-Instruct$"):
        with_local_files(config, tmp_path)
    (tmp_path / "Qwen2.5-Coder-1.5B-Instruct").mkdir()
    with pytest.raises(UserError, match=r"no .*train.jsonl, no .*test.jsonl"):
        with_local_files(config, tmp_path)


def test_a_line_has_the_figures_before_and_after(files, tmp_path):
    study = REAL_STUDIES["gsm8k_small"]()
    study = dataclasses.replace(study, base=with_fields(study.base, TINY), files=files)
    job = study.job(study.tasks[0], study.arms[1], 0, 1e-3, tmp_path)
    line = study.measure(job)
    shown = {metric.key for metric in study.metrics}
    assert shown - {"merged_greedy", "merged_sampled", *DERIVED} <= set(line["final"])
    assert [point["step"] for point in line["curve"]] == [0]
    assert {curve.y for curve in study.curves} - {"eval_accuracy"} <= set(line["curve"][0])
    assert 0 < line["final"]["tokens_sampled"] <= 8


def test_a_calibrated_arm_is_merged_and_tested_again(files, tmp_path, monkeypatch):
    study = REAL_STUDIES["gsm8k_small"]()
    study = dataclasses.replace(study, base=with_fields(study.base, TINY), files=files)
    arm = next(arm for arm in study.arms if arm.name == "nvfp4-gptq")
    job = study.job(study.tasks[0], arm, 0, 1e-3, tmp_path)
    read = []
    monkeypatch.setattr(real_models, "load_sampler", lambda c, t: read.append(c.model) or load_sampler(c, t))
    line = study.measure(job)
    assert {metric.key for metric in study.metrics} - set(DERIVED) <= set(line["final"])
    assert [(Path(model.path).name, model.calibrate) for model in read] == [
        ("base", "gptq"),
        ("merged", "none"),
    ]
    assert not (job.folder / "merged").exists()


def test_an_untrained_arm_is_calibrated_and_measured_so(files, tmp_path):
    study = REAL_STUDIES["gsm8k_untrained"]()
    study = dataclasses.replace(study, base=with_fields(study.base, TINY), files=files)
    arm = next(arm for arm in study.arms if arm.name == "nvfp4-gptq")
    job = study.job(study.tasks[0], arm, 0, None, tmp_path)
    line = measure_before_training(job)
    assert (job.folder / "base" / "config.json").exists()
    assert {metric.key for metric in study.metrics} <= set(line["final"])


def test_an_arm_takes_the_rate_that_another_chose(tmp_path):
    study = dataclasses.replace(REAL_STUDIES["gsm8k"](), rates=(2e-5, 5e-5, 1e-4))
    trials = choice_jobs(study, tmp_path)
    assert {job.arm for job in trials} == {"bf16", "nvfp4", "full"}
    chosen = {"bf16": 2e-5, "nvfp4": 1e-4, "full": 3e-6}

    class Lines:
        def lines_of(self, jobs):
            return [
                {"learning_rate": job.rate, "final": {"greedy": float(job.rate == chosen[job.arm])}}
                for job in jobs
            ]

    rates = best_rates(study, trials, Lines())
    jobs = final_jobs(study, tmp_path, rates)
    found = {job.arm: job.rate for job in jobs}
    assert found == {
        **chosen,
        **dict.fromkeys(("nvfp4+aqn", "nf4", "mxfp4", "nvfp4-gptq", "nvfp4-gptq+aqn"), 1e-4),
        "bf16+aqn": 2e-5,
    }
    assert len(jobs) == 9 * len(study.seeds)


def group(texts, answer):
    samples = [Sample(tokens_T=[1], logprobs_T=[0.0], text=text, finish="stop", version=0) for text in texts]
    prompt = Prompt(messages=[], tokens_T=[1], text="", columns={"answer": answer}, index=0)
    return Group(prompt=prompt, samples_G=samples)


def test_strict_takes_the_number_behind_the_last_mark():
    assert strict("so #### 1,200", "... #### 1200") and strict("#### $7.0", "7")
    assert not strict("it is 7", "#### 7")
    assert not strict("#### 7 no, #### 8", "#### 7")
    assert not strict("#### ", "#### 0")


def test_accuracies_and_votes_are_worked_by_hand():
    groups = [group(["#### 3"], "#### 3"), group(["it is 4"], "#### 4"), group(["#### 1"], "#### 5")]
    assert _accuracies("greedy", groups, [[1.0], [1.0], [None]]) == {
        "greedy": pytest.approx(2 / 3),
        "strict_greedy": pytest.approx(1 / 3),
    }
    right, wrong = ["#### 3"] * 5 + ["2"] * 3, ["#### 2"] * 5 + ["3"] * 3
    rewards = [[1.0] * 5 + [0.0] * 3, [0.0] * 5 + [1.0] * 3]
    with VotePool(num_workers=1) as pool:
        figures = _votes([group(right, "#### 3"), group(wrong, "#### 3")], rewards, pool)
    assert figures == {"pass@8": 1.0, "maj@8": 0.5}
