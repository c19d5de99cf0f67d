"""The benchmark of a fresh process loads, samples and learns, and its checkpoint has the shape asked for."""

import dataclasses
import functools
import json
import sys
import time

import pytest

from benchmarks import start
from benchmarks.__main__ import main
from benchmarks.start import StartOptions, measure, write_checkpoint
from qerl.errors import UserError
from qerl.models.checkpoint.source import locate
from qerl.models.checkpoint.state_dict import architecture_of
from qerl.models.random_weights import shape

SIZES = {"num_layers": 1, "width": 64, "ff_width": 96, "vocab_size": 256, "max_positions": 512}
HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_size": 32}


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b", "mistral-7b-v0.3", "qwen2.5-0.5b"])
def test_the_checkpoint_has_the_shape(name, tmp_path):
    a = dataclasses.replace(shape(name), **SIZES, **HEADS)
    found = architecture_of(locate(str(write_checkpoint(a, tmp_path / "model"))).open())
    assert dataclasses.replace(found, rope=a.rope, layer_kinds=()) == a
    assert (found.rope.kind, found.rope.theta) == (a.rope.kind, a.rope.theta)


def test_a_shape_with_more_in_its_config_is_refused(tmp_path):
    a = dataclasses.replace(shape("llama-3.1-8b"), **SIZES, **HEADS)
    with pytest.raises(UserError, match="--model"):
        write_checkpoint(a, tmp_path / "model")


def tiny_model(folder):
    return str(write_checkpoint(dataclasses.replace(shape("qwen2.5-7b"), **SIZES, **HEADS), folder / "model"))


def test_a_process_loads_samples_and_learns(tmp_path):
    before = start.TALLY.report()  # of this process' other tests
    found = (0, None) if before is None else (before.num_kernels, before.error)
    sizes = {"rows": 8, "prompt_tokens": 8, "max_tokens": 16, "lora_rank": 16}
    row = measure(StartOptions(model=tiny_model(tmp_path), **sizes), time.time())
    assert 0 <= row["imported_s"] < row["loaded_s"] < row["first_step_s"] < row["learned_s"]
    assert (row["num_kernels"], row["error"]) == found or row["device"] != "cpu"


@pytest.mark.slow
def test_it_prints_a_line_for_each_cache_of_the_asked_way_to_compile(tmp_path, monkeypatch, capsys):
    """Of one process: a second one would import torch for the same line."""
    monkeypatch.setattr(start, "_in_process", functools.cache(lambda *_, of=start._in_process: of(*_)))
    sizes = ("--rows=8", "--prompt-tokens=8", "--max-tokens=16", "--lora-rank=16")
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "start", f"--model={tiny_model(tmp_path)}", *sizes, "--ahead=False"]
    )
    main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["cache"], line["while_loading"]) for line in lines] == [("cold", False), ("warm", False)]


def test_every_cache_is_measured_with_and_without_compiling_ahead(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(start, "_in_process", lambda options, cache, ahead: {"cache_folder": cache.name})
    start.bench_start(StartOptions(model=tiny_model(tmp_path)))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [("cold", False), ("warm", False), ("cold", True), ("warm", True)]
    assert [(line["cache"], line["while_loading"]) for line in lines] == cases
    assert len({line["cache_folder"] for line in lines}) == 2


def test_rows_are_whole_groups():
    with pytest.raises(UserError, match="multiple of 8"):
        StartOptions(rows=12)
