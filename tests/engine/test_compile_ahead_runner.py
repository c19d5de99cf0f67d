"""A runner compiles ahead what its steps of every number of rows launch, and launches none of it."""

import pytest
import torch

from qerl.engine.decode_runner import DecodeRunner
from qerl.kernels import nvrtc
from qerl.kernels.nvrtc import compiled


class Sampler:
    is_capturable = False


def test_the_kernels_of_every_number_of_rows_are_compiled(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    cpu = torch.device("cpu")

    def forward(state, num_rows):
        kernel = compiled("rotary.cu", "rotate", cpu, {"HEAD": 32 * num_rows, "THREADS": 128})
        kernel.launch(grid=1, block_threads=128, parameters=())
        return torch.zeros(num_rows, 8)

    sizes = {"max_rows": 4, "max_pages": 1, "page_tokens": 16, "max_steps": 1, "min_rows": 1}
    runner = DecodeRunner(forward, Sampler(), **sizes, device=cpu, pool=None)  # type: ignore[arg-type]
    report = runner.compile_ahead(most_samples=3)
    assert (report.num_kernels, report.num_compiled) == (3, 3) and report.compile_s > 0
    heads = [32 * rows for rows in (1, 2, 3, 4)]
    paths = [nvrtc.cubin_path("rotary.cu", {"HEAD": head, "THREADS": 128}, "sm_86") for head in heads]
    assert [path.exists() for path in paths] == [True, True, True, False]
    assert runner.compile_ahead(most_samples=9).num_compiled == 1 and paths[3].exists()
