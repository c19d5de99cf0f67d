"""vLLM is run on the lengths of qerl bench rollout."""

import importlib.util
import subprocess
import sys

import pytest

from benchmarks.vllm_rollout import VllmRolloutOptions, lengths_of
from qerl.cli.bench.case import make_case
from qerl.cli.bench.options import BenchRolloutOptions
from qerl.cli.bench.rollout import RolloutCase


def test_the_lengths_are_those_of_qerls_benchmark():
    case = make_case(RolloutCase, BenchRolloutOptions(), provider="qerl-bf16")
    assert lengths_of(VllmRolloutOptions()) == case.lengths_S


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_it_is_one_line():
    command = [sys.executable, "-m", "benchmarks", "vllm-rollout"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("benchmarks: vLLM cannot be imported") and done.stderr.count("\n") == 1
