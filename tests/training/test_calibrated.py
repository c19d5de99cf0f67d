"""A merged model loses what it learned when it is rounded to NVFP4, and keeps it calibrated."""

import collections
import dataclasses
import json
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_run
from qerl import training
from qerl.config import ModelConfig
from qerl.config.options import ExportOptions, QuantizeOptions
from qerl.config.stored import read_run_config, with_stored_base
from qerl.errors import RunError, UserError
from qerl.export import export
from qerl.learner.distributed import Ranks
from qerl.learner.plan.memory import with_fields
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.tokenizer import load_tokenizer
from qerl.models.device import resolve_device
from qerl.models.quantize.quantize import quantize
from qerl.tasks import RewardPool, Task
from qerl.training import calibration_cache
from qerl.training.calibrated import NOTE, refuse_calibration, with_calibrated_base
from qerl.training.policy import load_sampler
from qerl.training.rollouts.evaluation import EVALUATION_STEP, sample_and_score
from qerl.training.rollouts.rollout import sampling_of
from qerl.types import GenerateRequest

TRAINING = {
    "num-steps": 40,
    "num-prompts": 8,
    "num-generations": 8,
    "adapter.alpha": 4,
    "sample.max-tokens": 1,
    "learn.learning-rate": 0.004,
    "noise.schedule": "none",
    "evaluate.num-prompts": 0,
    "checkpoint.every": 40,
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """(the config of a run that learned to start with an even token, its merged model)."""
    files = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    with_larger_weights(files / "model.safetensors")
    given = [part for name, value in TRAINING.items() for part in (f"--{name}", str(value))]
    given = [*tiny_run.options(files, files / "run"), *given]
    process = tiny_run.started(*tiny_run.QERL, "train", "demo_long", *given)
    assert process.communicate(timeout=120) and process.returncode == 0
    config = read_run_config(str(files / "run"))
    export(config, ExportOptions(run=files / "run", out=files / "merged", form="merged"))
    return dataclasses.replace(config, out=str(files / "next")), files / "merged"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def calibrated(config, path, out, **changes):
    """(the files of base in `out`, the notices)."""
    notices = []
    config = dataclasses.replace(model_of(config, path, calibrate="gptq"), out=str(out), **changes)
    with_calibrated_base(config, Ranks(0, 1), notices.append)
    return {file.name: file.read_bytes() for file in (out / "base").iterdir()}, notices


def test_a_second_run_with_the_same_settings_takes_the_cached_model(merged, tmp_path, monkeypatch):
    config, path = merged
    first, said = calibrated(config, path, tmp_path / "a")
    monkeypatch.setattr(training.calibrated, "requantize", None)
    second, notices = calibrated(config, path, tmp_path / "b")
    assert second == first
    assert notices[0] == said[0] == "model.calibrate gptq: block scales plain (model.scales)"
    assert notices[1].startswith(
        "model.calibrate gptq: cached by a run with the same settings, where it took "
    )
    assert notices[2:] == [line for line in said if "KL to the float weights" in line]
    moved = shutil.copytree(path, tmp_path / "moved")
    third, _ = calibrated(config, moved, tmp_path / "c")
    assert json.loads(third.pop(NOTE))["model"] == str(moved)
    assert third == {name: content for name, content in first.items() if name != NOTE}
    monkeypatch.undo()
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "another"))
    again, _ = calibrated(config, path, tmp_path / "d")
    assert all(again[name] == first[name] for name in first if name != NOTE)  # by seed, not by chance


def test_scales_are_mse_unless_they_are_set(merged, tmp_path, monkeypatch):
    config, path = merged
    assert ModelConfig().block_scales == QuantizeOptions(model="m", out=tmp_path).block_scales == "plain"
    assert resolve_device(ModelConfig(calibrate="auto")).scales == "mse"
    assert ModelConfig(calibrate="gptq", scales="plain").block_scales == "plain"
    config = with_fields(config, "model", scales="auto")  # the record of a run has what auto was
    first, said = calibrated(config, path, tmp_path / "a")
    assert said[0] == "model.calibrate gptq: block scales mse (model.scales)"
    monkeypatch.setattr(training.calibrated, "requantize", None)
    second, _ = calibrated(with_fields(config, "model", scales="mse"), path, tmp_path / "b")
    assert second == first
    monkeypatch.undo()
    plain, _ = calibrated(with_fields(config, "model", scales="plain"), path, tmp_path / "c")
    assert plain["model.safetensors"] != first["model.safetensors"]


def with_other_bytes(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_another_template(folder):
    (folder / "chat_template.jinja").write_text(" " + tiny_run.CHATML)


@pytest.mark.parametrize(
    ("change", "change_files"),
    [
        (lambda config: dataclasses.replace(config, seed=config.seed + 1), None),
        (lambda config: dataclasses.replace(config, num_prompts=config.num_prompts + 1), None),
        (lambda config: with_fields(config, "sample", temperature=0.5), None),
        (lambda config: with_fields(config, "sample", max_tokens=2), None),
        (lambda config: with_fields(config, "model", scales="mse"), None),
        (lambda config: with_fields(config, "task", template="{prompt} "), None),
        (lambda config: config, with_other_bytes),
        (lambda config: config, with_another_template),
    ],
)
def test_another_model_prompt_setting_or_seed_is_another_entry(
    merged, tmp_path, monkeypatch, change, change_files
):
    config, path = merged
    path, keys = Path(shutil.copytree(path, tmp_path / "model")), []
    monkeypatch.setattr(training.calibrated, "_calibrate", lambda config, base, *_: base.mkdir(parents=True))
    monkeypatch.setattr(calibration_cache, "store", lambda key, *_: keys.append(key))
    calibrated(config, path, tmp_path / "a")
    if change_files is not None:
        change_files(path)
    calibrated(change(config), path, tmp_path / "b")
    calibrated(change(config), path, tmp_path / "c")
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize("damage", ["bytes", "removed", "added", "manifest"])
def test_a_damaged_entry_of_the_cache_is_named_and_made_again(merged, tmp_path, cache, damage):
    config, path = merged
    first, _ = calibrated(config, path, tmp_path / "a")
    (entry,) = (file for file in (cache / "calibrated").iterdir() if file.is_dir())
    shard = entry / "model.safetensors"
    content = bytearray(shard.read_bytes())
    shard.unlink()  # the run's file is the same one
    content[-1] ^= 1
    if damage in ("bytes", "added", "manifest"):
        shard.write_bytes(content if damage == "bytes" else first["model.safetensors"])
    if damage == "added":
        (entry / "more.json").write_text("{}")
    if damage == "manifest":
        entry.with_suffix(".json").write_text("{")
    second, notices = calibrated(config, path, tmp_path / "b")
    assert str(entry) in notices[1] and notices[1].endswith("; calibrating again")
    assert all(second[name] == first[name] for name in first if name != NOTE)
    _, notices = calibrated(config, path, tmp_path / "c")
    assert "cached by a run" in notices[1]


def test_a_cache_that_cannot_be_written_is_a_notice(merged, tmp_path, cache):
    config, path = merged
    cache.write_text("a file")
    files, notices = calibrated(config, path, tmp_path / "a")
    assert "model.safetensors" in files and "the calibrated model is not cached" in notices[-1]


def test_a_gpu_that_runs_out_of_memory_is_one_line(merged, tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    config, path = merged
    monkeypatch.setattr(training.calibrated, "requantize", full)
    with pytest.raises(RunError, match=r"model.calibrate gptq: needs more memory .* --model.calibrate none"):
        calibrated(config, path, tmp_path / "a")
    assert not (tmp_path / "a" / "base").exists()


def with_larger_weights(file):
    """Random weights of transformers are so small that hardly anything depends on the prompt."""
    scales = {"proj": 8, "embed": 12, "norm": 1}
    tensors = load_file(file)
    for name, tensor in tensors.items():
        tensor *= next(scale for key, scale in scales.items() if key in name)
    save_file(tensors, file, metadata={"format": "pt"})


def model_of(config, path, **changes):
    model = dataclasses.replace(config.model, path=str(path), **changes)
    return dataclasses.replace(config, model=resolve_device(model))


def accuracy(config):
    tokenizer = load_tokenizer(config.model.path)
    task = Task(config.task, tokenizer, seed=config.seed, max_prompt_tokens=100)
    _, engine = load_sampler(config, tokenizer)
    with RewardPool(config.task) as pool:
        prompts, sampling = task.held_out(None), sampling_of(config)
        request = GenerateRequest(prompts, num_samples=64, sampling=sampling, seed=1, step=EVALUATION_STEP)
        _, rewards_P_G = sample_and_score(engine, pool.score, request)
    return fmean(reward for rewards_G in rewards_P_G for reward in rewards_G)


def test_the_calibrated_model_keeps_nine_tenths_of_what_rounding_loses(merged):
    config, path = merged
    notices = []
    calibrated = with_calibrated_base(model_of(config, path, calibrate="gptq"), Ranks(0, 1), notices.append)
    assert "nvfp4 by gptq keeps 9" in notices[-1] and not notices[-1].startswith("warning")
    again = with_calibrated_base(model_of(config, path, calibrate="gptq"), Ranks(0, 1), pytest.fail)
    assert again == calibrated and calibrated.model.path == f"{config.out}/base"
    base, best, plain, kept = map(
        accuracy, (config, model_of(config, path, format="bf16"), model_of(config, path), calibrated)
    )
    assert best - base > 0.3
    assert plain - base < 0.7 * (best - base)
    assert kept - base > 0.9 * (best - base)
    packed = model_of(
        dataclasses.replace(config, out=str(path.parent / "c")), calibrated.model.path, calibrate="gptq"
    )
    with pytest.raises(UserError, match="is quantized already"):
        with_calibrated_base(packed, Ranks(0, 1), notices.append)


def test_the_float_weights_are_read_once(merged, tmp_path, monkeypatch):
    """Of a GGUF file of 1.5B weights that takes longer than to quantize them."""
    config, path = merged
    kind, names = type(locate(str(path)).open()), []
    read = kind.read
    monkeypatch.setattr(kind, "read", lambda self, name: names.append(name) or read(self, name))
    config = dataclasses.replace(model_of(config, path, calibrate="gptq"), out=str(tmp_path))
    with_calibrated_base(config, Ranks(0, 1), lambda text: None)
    counts = collections.Counter(name for name in names if "proj" in name and name.endswith("weight"))
    assert len(counts) == 14 and max(counts.values()) == 1, counts


def test_a_run_trains_its_calibrated_base_and_is_evaluated_over_it(merged):
    _, path = merged
    files, out = path.parent, path.parent / "run of merged"
    given = [*tiny_run.options(files, out), "--model.path", str(path), "--model.calibrate", "gptq"]
    for _ in range(2):  # the second takes base as it is
        process = tiny_run.started(*tiny_run.QERL, "train", "demo_long", *given, "--num-steps", "2")
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    said = [json.loads(line)["text"] for line in (out / "events.jsonl").read_text().splitlines()]
    assert sum("nvfp4 by gptq keeps" in text for text in said) == 1
    assert not any("KL to the float weights" in text and "gptq" not in text for text in said)
    assert json.loads((out / "run.json").read_text())["config"]["model"]["path"] == str(path)
    moved = out.rename(files / "moved")
    stored = read_run_config(str(moved))
    assert stored.model.path == str(moved / "base")
    assert accuracy(model_of(stored, stored.model.path, calibrate="none")) > 0.9


def test_another_model_in_the_folder_of_a_calibrated_one_is_refused_by_name(merged, tmp_path):
    config, path = merged
    first = dataclasses.replace(model_of(config, path, calibrate="gptq"), out=str(tmp_path))
    with pytest.raises(UserError, match="has no folder base with the calibrated model"):
        with_stored_base(first, tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / NOTE).write_text(json.dumps({"model": "another"}))
    with pytest.raises(UserError, match=f"base: was made of another, not of {path}; choose another folder"):
        with_calibrated_base(first, Ranks(0, 1), pytest.fail)


def test_prompts_are_calibrated_on_with_the_runs_template_variables(merged, tmp_path):
    config, path = merged
    model = Path(shutil.copytree(path, tmp_path / "model"))
    template = "{% if mode != 'short' %}{{ raise_exception('mode is not set') }}{% endif %}" + tiny_run.CHATML
    (model / "chat_template.jinja").write_text(template)
    task = dataclasses.replace(config.task, chat_template_kwargs='{"mode": "short"}')
    config = dataclasses.replace(config, task=task, out=str(tmp_path / "run"))
    with_calibrated_base(model_of(config, model, calibrate="gptq"), Ranks(0, 1), lambda text: None)
    assert (tmp_path / "run" / "base" / NOTE).is_file()


def test_commands_without_a_task_and_other_formats_refuse_to_calibrate():
    refuse_calibration(ModelConfig())
    with pytest.raises(UserError, match="qerl quantize m OUT --calibrate gptq"):
        refuse_calibration(ModelConfig(path="m", calibrate="gptq"))
    with pytest.raises(UserError, match=r"needs model\.format nvfp4, got fp8"):
        ModelConfig(calibrate="gptq", format="fp8")


@pytest.mark.parametrize("data", ["run/samples.jsonl", "text.txt"])
def test_quantize_calibrates_on_a_runs_samples_or_a_text(merged, data, capsys):
    files = merged[1].parent
    (files / "text.txt").write_text("one and two is three, " * 20)
    out = files / f"by {data.partition('/')[0]}"
    quantize(QuantizeOptions(model=str(merged[1]), out=out, calibrate="gptq", data=files / data))
    line = capsys.readouterr().err.splitlines()[-1]
    kept = int(line.split("keeps ")[1].split("%")[0])
    assert (kept > 95) == (data != "text.txt"), line
