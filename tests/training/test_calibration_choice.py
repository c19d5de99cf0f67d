"""model.calibrate auto calibrates where that is estimated to take less time than the first evaluation."""

import dataclasses
import json
import math
import re

import pytest
import torch

import tiny_run
from qerl.cli.main import command
from qerl.config import EvalConfig, ModelConfig, RunConfig
from qerl.config.stored import CHOICE, read_run_config
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.training import calibration_choice
from qerl.training.calibration_choice import Rates, estimates, measure, obstacle

FAST, SLOW = Rates(1e-6, 1e-18, 1e-18), Rates(1e-12, 1e-9, 1e-6)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_run.write_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))


def finish(files, out, *more):
    given = [*tiny_run.options(files, out), "--model.calibrate", "auto", "--num-steps", "2", *more]
    process = tiny_run.started(*tiny_run.QERL, "train", "demo_long", *given)
    _, stderr = process.communicate(timeout=120)
    texts = [json.loads(line)["text"] for line in (out / "events.jsonl").read_text().splitlines()]
    return process.returncode, stderr, [text for text in texts if "model.calibrate auto" in text]


def test_the_estimates_are_the_sums_of_their_parts(files):
    a = architecture_of(locate(str(files)).open())
    config = RunConfig(model=ModelConfig(device="cpu"), evaluate=EvalConfig(num_prompts=256), num_prompts=8)
    # width 64, 4 heads, 2 k and v heads, F 96, two layers, 272 tokens
    groups = [(64 + 32 + 32, 64), (64, 64), (2 * 96, 64), (64, 96)]
    weights = 2 * sum(n * k for n, k in groups)
    inputs = 2 * sum(n * k * k for n, k in groups)
    length, running = config.sample.max_tokens / 2, min(256, config.engine.max_rows(has_kernels=True))
    step_s = 3.0 * (weights + 272 * 64)
    calls = math.ceil(8192 / (256 * 128))  # half of MAX_SAMPLE_TOKENS
    calibration = calls * 128 * step_s + 4 * 8192 * weights * 5.0 + inputs * 7.0
    evaluation = 2 * math.ceil(256 / running) * length * step_s
    estimated = estimates(a, config, Rates(3.0, 5.0, 7.0))
    assert estimated == pytest.approx((calibration, evaluation), rel=1e-12)


def test_rates_of_this_machine_are_positive_seconds():
    rates = measure(torch.device("cpu"), torch.float32, 4)
    assert all(0 < rate < 1e-3 for rate in rates)


@pytest.mark.parametrize(("rates", "is_on"), [(FAST, True), (SLOW, False)])
def test_the_choice_is_told_once_and_stays_with_the_run(files, tmp_path, monkeypatch, rates, is_on):
    out = tmp_path / "run"
    monkeypatch.setattr(calibration_choice, "measure", lambda *_: rates)
    monkeypatch.setattr(calibration_choice, "calibration_tokens", lambda a, device: 16)
    code, stderr, (line,) = finish(files, out)
    assert code == 0, stderr
    assert line.startswith(f"model.calibrate auto: {'on' if is_on else 'off'}, calibration takes about ")
    assert " s, the first evaluation " in line and (out / "base").is_dir() == is_on
    stored = read_run_config(str(out))
    assert stored.model.path == (str(out / "base") if is_on else str(files))
    monkeypatch.setattr(calibration_choice, "measure", None)  # a resumed run does not measure again
    code, stderr, lines = finish(files, out, "--num-steps", "3")
    assert code == 0 and len(lines) == 1, stderr
    (out / CHOICE).write_text('{"calibrate": "awq"}')
    with pytest.raises(UserError, match=r"calibrate\.json: is damaged .*'awq'.*; restore it"):
        read_run_config(str(out))


def test_a_gpu_with_too_little_memory_is_not_calibrated_on(files, tmp_path, monkeypatch):
    model = ModelConfig(path=str(files), calibrate="auto", device="cpu", dtype="fp32")
    config, said = RunConfig(model=model, out=str(tmp_path), evaluate=EvalConfig(num_prompts=256)), []
    monkeypatch.setattr(calibration_choice, "measure", lambda *_: FAST)
    for gpu_bytes, choice in ((1e6, "none"), (1e12, "gptq"), (0.0, "gptq")):  # 0: a CPU
        monkeypatch.setattr(calibration_choice, "memory_bytes", lambda device, size=gpu_bytes: size)
        assert calibration_choice.choose(config, said.append) == choice
    assert re.fullmatch(r"model.calibrate auto: off, calibration needs about \d GB, the GPU has 0", said[0])


def test_a_run_whose_calibrated_base_is_gone_is_refused(files, tmp_path):
    (tmp_path / CHOICE).write_text('{"calibrate": "gptq"}')
    (tmp_path / "run.json").write_text(
        json.dumps({"config": dataclasses.asdict(RunConfig(model=ModelConfig(calibrate="auto")))})
    )
    with pytest.raises(UserError, match="has no folder base with the calibrated model"):
        read_run_config(str(tmp_path))


def test_what_cannot_calibrate_is_off_and_says_why(files, tmp_path):
    model = ModelConfig(path=str(files), calibrate="auto")
    config = RunConfig(model=model)
    assert obstacle(config) is None
    assert "model.format is fp8" in obstacle(RunConfig(model=dataclasses.replace(model, format="fp8")))
    assert "is 0" in obstacle(dataclasses.replace(config, evaluate=EvalConfig(num_prompts=0)))
    command(["quantize", str(files), str(tmp_path / "packed")])
    packed = dataclasses.replace(model, path=str(tmp_path / "packed"))
    assert obstacle(RunConfig(model=packed)) == "the model is quantized already"
    code, stderr, (line,) = finish(files, tmp_path / "run", "--model.format", "fp8")
    assert code == 0 and line == "model.calibrate auto: off, model.format is fp8, not nvfp4", stderr
