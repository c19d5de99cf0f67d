"""On a GPU: after compiling ahead, loading, sampling and learning compile nothing more."""

import dataclasses
import time

import pytest
import torch

from benchmarks.start import StartOptions, measure, run_config, write_checkpoint
from qerl.kernels.runtime import nvrtc
from qerl.models.random_weights import shape
from qerl.training.compile_plan import compile_while_loading

SIZES = {"num_layers": 2, "width": 128, "ff_width": 192, "vocab_size": 1024, "max_positions": 512}
HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64}


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4", "nf4", "bf16"])
def test_after_compiling_ahead_a_run_compiles_nothing(format, tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path / "cache"))
    a = dataclasses.replace(shape("qwen2.5-7b"), **SIZES, **HEADS)
    model = str(write_checkpoint(a, tmp_path / "model"))
    options = StartOptions(model=model, format=format, rows=16, prompt_tokens=40, max_tokens=60, ahead=False)
    compiler = compile_while_loading(run_config(options), 100)
    assert compiler is not None
    compiler.wait()

    def fail(file, defines, architecture):
        raise AssertionError(f"not planned: {file} {defines}")

    monkeypatch.setattr(nvrtc, "compile_cubin", fail)
    row = measure(options, time.time())
    assert row["error"] is None and row["num_kernels"] > 10
