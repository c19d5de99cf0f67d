"""vLLM is run on the lengths of qerl bench rollout."""

import importlib.util
import sys

import pytest

from benchmarks import __main__
from benchmarks.vllm_rollout import VllmRolloutOptions, lengths_of
from qerl.bench.case import make_case
from qerl.bench.options import BenchRolloutOptions
from qerl.bench.rollout import RolloutCase


def test_the_lengths_are_those_of_qerls_benchmark():
    case = make_case(RolloutCase, BenchRolloutOptions(), provider="qerl-bf16")
    assert lengths_of(VllmRolloutOptions()) == case.lengths_S


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "vllm-rollout"])
    with pytest.raises(SystemExit) as stop:
        __main__.main()
    shown = capsys.readouterr()
    assert stop.value.code == 2 and shown.out == ""
    assert shown.err.startswith("benchmarks: vLLM cannot be imported") and shown.err.count("\n") == 1
