"""Kernels that no GPU has run are replaced by PyTorch operations until they are asked for."""

import pytest

from models.family_rows import ROWS, oracle
from qerl.models import untried
from qerl.models.families import from_hf_config

UNTRIED = ("Glm4", "Qwen3Next", "Qwen3_5")


@pytest.fixture
def unasked(monkeypatch):
    monkeypatch.delenv("QERL_UNTRIED")


@pytest.mark.parametrize("family", ROWS)
def test_a_family_with_parts_that_no_gpu_has_run_names_one(unasked, monkeypatch, family):
    text = "Gemma3" if family == "Gemma3" else family
    config = oracle(family).config.to_dict()
    architecture = from_hf_config(config | {"architectures": [f"{text}ForCausalLM"]})
    said = untried.untried_obstacle(architecture)
    assert (said is not None) == (family in UNTRIED), said
    assert said is None or (said.startswith("no GPU has run their ") and said.endswith("uses them)"))
    monkeypatch.setenv("QERL_UNTRIED", "1")
    assert untried.untried_obstacle(architecture) is None
