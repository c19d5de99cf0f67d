"""What loads a model for clients says how far it is, as training does."""

import re

import pytest

import tiny_run
from qerl.config import ModelConfig
from qerl.config.options import TinkerOptions
from qerl.serve.loaded_model import load_model
from qerl.tinker.server import load_app
from qerl.tracking import progress


def load_for_serve(folder):
    load_model(str(folder), None, ModelConfig(path=str(folder), dtype="fp32"), with_adapter=True)


def load_for_tinker(folder):
    model = ModelConfig(path=str(folder), dtype="fp32")
    load_app(str(folder), TinkerOptions(model=model, checkpoints=folder / "saved", max_rank=8))


@pytest.mark.parametrize("load", [load_for_serve, load_for_tinker])
def test_a_slow_load_says_how_many_layers_are_there(load, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    tiny_run.write_model(tmp_path)
    capsys.readouterr()
    load(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    layers = [m[1] for line in lines if (m := re.match(r"loading .* in nvfp4: (\d) of 2 layers, ", line))]
    assert layers[:2] == ["1", "2"]
