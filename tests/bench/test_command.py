"""`qerl bench` says in one line what it cannot do."""

import sys

import pytest
import torch

from qerl.cli import bench, main


def fail(monkeypatch, capsys, *arguments):
    """(exit code, what it printed as an error)"""
    monkeypatch.setattr(sys, "argv", ["qerl", "bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        main.main()
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["bench needs one benchmark", "decode", "learn", "step"]),
        (["lern"], ["unknown benchmark lern", "did you mean learn"]),
        (["memory", "--steps", "3"], ["unknown benchmark memory", "choose from decode, learn"]),
        (["decode", "--shape", "qwen2.5-8b"], ["unknown shape qwen2.5-8b", "qwen2.5-7b"]),
        (["decode", "--batches", "8", "0"], ["batches must be positive", "got 0"]),
        (["decode", "--lora-ranks", "0", "-8"], ["lora_ranks must not be negative", "got -8"]),
        (["decode", "--max-tokens", "0"], ["max_tokens must be positive", "got 0"]),
        (["decode", "--noise-sigmas", "0.01", "-0.1"], ["noise_sigmas must not be negative", "got -0.1"]),
        (["decode", "--batches", "9", "--group-size", "4"], ["multiples of group_size 4", "got 9"]),
        (["learn", "--micro-batches", "3"], ["tokens must be a multiple of", "8192 for 3 x 2048"]),
        (["learn", "--num-samples", "12"], ["num_samples must be a multiple of 8", "got 12"]),
        (["step", "--batches", "9"], ["multiples of group_size 8", "got 9"]),
        (["step", "--memory", "--cap-gb", "-1"], ["cap_gb must be positive", "got -1"]),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, capsys, arguments, parts):
    code, error = fail(monkeypatch, capsys, *arguments)
    assert code == 2 and error.startswith("qerl: ") and error.count("\n") == 1
    assert all(part in error for part in parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is none")
@pytest.mark.parametrize("arguments", [[name] for name in bench.BENCHMARKS])
def test_without_a_gpu_it_is_one_line(monkeypatch, capsys, arguments):
    code, error = fail(monkeypatch, capsys, *arguments)
    assert (code, error) == (2, "qerl: bench needs a CUDA device, and PyTorch found none\n")
