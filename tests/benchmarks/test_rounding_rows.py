"""The benchmark of rounding measures the written cases on held-out prompts."""

import json

import pytest

import tiny_run
from benchmarks.rounding import RoundingOptions, bench_rounding
from qerl.config import TaskConfig
from qerl.errors import UserError


def test_a_row_has_the_errors_of_its_format_and_method(tmp_path, capsys):
    task = TaskConfig(name=str(tiny_run.write_task(tmp_path)), rewards=("exact",))
    model, formats, methods = (
        tiny_run.write_model(tmp_path / "model"),
        ("nvfp4", "bf16"),
        ("nearest", "search"),
    )
    bench_rounding(
        RoundingOptions(
            model=str(model), task=task, formats=formats, methods=methods, num_prompts=3, max_tokens=8
        )
    )
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [(row["format"], row["method"]) for row in rows]
    assert cases == [(format, method) for format in ("nvfp4", "bf16") for method in ("nearest", "search")]
    nearest, search, *exact = rows
    assert 0 < search["weight_error"] < nearest["weight_error"] < 0.2 and nearest["kl"] > 0
    assert all((row["kl"], row["agreement"], row["weight_error"]) == (0, 1, 0) for row in exact)
    assert len({row["num_tokens"] for row in rows}) == 1


def test_an_unknown_method_is_refused_by_name():
    with pytest.raises(UserError, match="methods: nearst is none of nearest, search"):
        RoundingOptions(methods=("nearst",))
