"""`qerl check` and `qerl plan` on classes that transformers' code runs."""

import json
import shutil

import pytest

import tiny_run
from cli.test_main import assert_one_line, qerl
from models.any_family import oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("neox")
    files = tiny_run.write_files(tmp_path_factory.mktemp("tiny"))
    for file in files.glob("tokenizer*"):
        shutil.copy(file, folder)
    oracle("GPTNeoX").save_pretrained(folder)
    return folder


def test_check_says_that_transformers_code_runs_the_model_and_goes_on(folder, monkeypatch, capsys):
    code = qerl(monkeypatch, "check", "--model", str(folder), "--model.device", "cpu", "--json")
    findings = json.loads(capsys.readouterr().out)["findings"]
    (model,) = [each for each in findings if each["part"] == "model"]
    assert code == 0 and model["status"] == "note" and model["values"]["backend"] == "transformers"
    assert (
        "transformers' own code runs GPTNeoXForCausalLM" in model["text"] and "128 positions" in model["text"]
    )
    assert next(each["status"] for each in findings if each["part"] == "tokenizer") == "ok"


def test_check_names_a_setting_that_needs_the_packages_decoder(folder, monkeypatch, capsys):
    options = ("--model", str(folder), "--model.device", "cpu", "--engine.exact", "--json")
    assert qerl(monkeypatch, "check", *options) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    (model,) = [each for each in found if each["part"] == "model"]
    assert model["status"] == "broken" and model["text"].startswith("engine.exact needs")


@pytest.mark.parametrize("options", [(), ("--model.backend", "transformers")])
def test_plan_says_in_one_line_that_it_cannot(folder, monkeypatch, capsys, options):
    code = qerl(monkeypatch, "plan", str(folder), "--gpu", "rtx-4090", *options)
    assert_one_line(capsys, code, "transformers' code runs this model", "cannot be planned")
