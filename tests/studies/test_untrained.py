"""Measurements of an untrained policy, on a tiny model and by hand."""

import dataclasses
import functools
import math

import pytest
import torch

import tiny_run
from qerl.algo.estimate import pass_at_powers
from qerl.config import RunConfig
from qerl.formats import NVFP4
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of, linear_groups
from studies.gaussian_noise import GaussianNoiseCheckpoint
from studies.study import Job, with_fields
from studies.untrained import WEIGHTS, measure_untrained


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_run.write_task(folder)
    return tiny_run.write_model(folder, ff_width=128)


def job(files, *, format="bf16", weights="plain", seed=0):
    fields = {
        "seed": seed,
        "num_generations": 4,
        "model.path": str(files),
        "model.format": format,
        "model.dtype": "fp32",
        "task.name": str(files / "sums.jsonl"),
        "task.template": "{prompt}",
        "task.num_held_out": 8,
        "task.rewards": (f"{files / 'even.py'}:even",),
        "sample.max_tokens": 5,
        "evaluate.num_prompts": 8,
        "evaluate.success_threshold": 1.0,
    }
    config = with_fields(RunConfig(), fields)
    return Job(
        study="tiny", task="sums", arm="a", seed=seed, config=config, weights=weights, folder=files / "unused"
    )


@pytest.fixture(scope="module")
def final(files):
    """Give the figures of a job, each of which is measured once."""
    return functools.cache(lambda **asked: measure_untrained(job(files, **asked))["final"])


@pytest.fixture(scope="module")
def plain(final):
    return final()


def test_the_checkpoint_itself_is_at_no_distance(plain):
    assert abs(plain["kl"]) < 1e-6
    # bf16 rounds the linears of this float32 checkpoint: half of 2^-8 at most
    assert 0 < plain["weight_error"] < 2**-8 and plain["output_error"] < 2**-8


def test_rewards_that_failed_are_told_with_their_run(files, capsys):
    code = "def fails(completion_ids):\n    return [1 / (ids[0] % 3) for ids in completion_ids]\n"
    (files / "fails.py").write_text(code)
    asked = job(files)
    asked = dataclasses.replace(
        asked, config=with_fields(asked.config, {"task.rewards": (f"{files / 'fails.py'}:fails",)})
    )
    measure_untrained(asked)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tiny, sums, a, seed 0: no reward for ") and "ZeroDivisionError" in line


def test_a_random_model_s_entropy_is_nearly_that_of_a_fair_draw(plain):
    assert math.log(272) - 0.1 < plain["entropy"] <= math.log(272)
    assert math.log(272) - 0.1 < plain["first_entropy"] <= math.log(272)


def test_the_mean_surprise_of_the_samples_is_the_entropy(files, monkeypatch):
    """E[-log p] over what is drawn is the entropy of where it is drawn."""
    import studies.untrained as untrained

    seen = []
    entropies = untrained.entropies
    monkeypatch.setattr(
        untrained, "entropies", lambda d, groups, c: seen.extend(groups) or entropies(d, groups, c)
    )
    entropy = measure_untrained(job(files))["final"]["entropy"]
    surprises = [-logprob for group in seen for sample in group.samples_G for logprob in sample.logprobs_T]
    assert entropy == pytest.approx(sum(surprises) / len(surprises), abs=0.1)


@pytest.mark.parametrize(("format", "error"), [("nvfp4", 0.095), ("mxfp4", 0.112), ("nf4", 0.092)])
def test_formats_err_as_much_as_they_do_on_normal_weights(final, format, error):
    found = final(format=format)
    assert found["weight_error"] == pytest.approx(error, rel=0.06)
    assert found["output_error"] == pytest.approx(error, rel=0.15) and found["kl"] > 1e-5


def test_gaussian_noise_has_the_energy_of_nvfp4_s_error(final):
    nvfp4 = final(format="nvfp4")["weight_error"]
    noised = [final(weights="gaussian", seed=seed) for seed in (0, 1)]
    for found in noised:
        assert found["weight_error"] == pytest.approx(nvfp4, rel=0.02)
    assert noised[0]["weight_error"] != noised[1]["weight_error"]


def test_the_noise_is_that_of_the_seed_and_differs_by_matrix(files):
    checkpoint = locate(str(files)).open()
    architecture = architecture_of(checkpoint)
    a, b, c = (GaussianNoiseCheckpoint(checkpoint, architecture, NVFP4, seed) for seed in (3, 3, 4))
    k, v = (f"{linear}.weight" for linear in linear_groups(architecture)[0][1:])
    assert torch.equal(a.read(k), b.read(k)) and not torch.equal(a.read(k), c.read(k))
    z_k, z_v = ((a.read(name) - checkpoint.read(name)).flatten() for name in (k, v))
    assert torch.corrcoef(torch.stack((z_k, z_v)))[0, 1].abs() < 0.1
    norm = "model.norm.weight"
    assert torch.equal(a.read(norm), checkpoint.read(norm))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_least_squares_and_awq_err_less_where_they_say(final, format):
    plain = final(format=format)
    mse, awq = (final(format=format, weights=weights) for weights in ("mse", "awq+mse"))
    assert mse["weight_error"] < plain["weight_error"]
    assert awq["output_error"] < plain["output_error"]


def test_the_curve_is_pass_at_k(files):
    found = measure_untrained(job(files))
    assert [point["k"] for point in found["curve"]] == [1, 2, 4]
    assert found["final"]["pass@1"] == found["curve"][0]["pass"]


def test_pass_at_k_is_worked_by_hand():
    # 4 samples, 2 and 0 of them right: k = 2: 1 - C(2, 2) / C(4, 2) = 5/6 and 0
    correct_P_G = [[True, False, True, False], [False] * 4]
    assert pass_at_powers(correct_P_G) == pytest.approx({1: 0.25, 2: 5 / 12, 4: 0.5})


def test_every_arm_s_weights_are_known():
    from studies.catalog import STUDIES

    for make in STUDIES.values():
        study = make()
        assert {arm.weights for arm in study.arms} <= set(WEIGHTS)
        if study.name != "entropy":
            assert {arm.weights for arm in study.arms} == {"plain"}


def test_no_arm_is_another_under_a_new_name(tmp_path):
    from studies.catalog import SMALL_STUDIES, STUDIES

    for make in STUDIES.values():
        study = make()
        jobs = [study.job(task, arm, 0, None, tmp_path) for task in study.tasks for arm in study.arms]
        assert len({(job.task, job.digest) for job in jobs}) == len(jobs)
        if study.name in SMALL_STUDIES:
            assert len(study.seeds) >= 5 and len(study.tasks) >= 2


def test_a_digest_is_of_what_decides_the_numbers(files):
    first = job(files)
    assert first.digest != job(files, weights="mse").digest != job(files, seed=1).digest
    moved = dataclasses.replace(first, config=with_fields(first.config, {"out": "elsewhere"}))
    assert moved.digest == first.digest
