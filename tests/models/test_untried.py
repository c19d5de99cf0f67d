"""Kernels that no GPU has run are replaced by PyTorch operations until they are asked for."""

import dataclasses

import pytest
import torch

from models.family_rows import ROWS, oracle
from qerl.models import untried
from qerl.models.families import from_hf_config
from qerl.models.packed_linear import PackedTiles
from qerl.models.random_weights import random_decoder, shape

TRIED = ("Llama", "Mistral", "Qwen2", "Qwen3")


@pytest.fixture
def unasked(monkeypatch):
    monkeypatch.delenv("QERL_UNTRIED")


@pytest.mark.parametrize(("format", "is_tried"), [("nvfp4", True), ("nf4", False), ("int8", False)])
def test_tiles_of_tried_formats_are_used_without_asking(unasked, monkeypatch, format, is_tried):
    sizes = {"width": 128, "num_heads": 2, "num_kv_heads": 2, "ff_width": 128, "vocab_size": 64}
    arch = dataclasses.replace(shape("qwen2.5-0.5b"), num_layers=1, **sizes)
    decoder = random_decoder(arch, format=format, rank=None, device=torch.device("cpu"), seed=0)

    def tiled():
        decoder.layers[0].tile()
        return {isinstance(linear.weight, PackedTiles) for _, linear in decoder.linears()}

    assert tiled() == {is_tried}
    monkeypatch.setenv("QERL_UNTRIED", "1")
    assert tiled() == {True}


@pytest.mark.parametrize("family", ROWS)
def test_a_family_with_parts_that_no_gpu_has_run_names_one(unasked, monkeypatch, family):
    text = "Gemma3" if family == "Gemma3" else family
    config = oracle(family).config.to_dict()
    architecture = from_hf_config(config | {"architectures": [f"{text}ForCausalLM"]})
    said = untried.untried_obstacle(architecture)
    assert (said is None) == (family in TRIED), said
    assert said is None or (said.startswith("no GPU has run their ") and said.endswith("uses them)"))
    monkeypatch.setenv("QERL_UNTRIED", "1")
    assert untried.untried_obstacle(architecture) is None
