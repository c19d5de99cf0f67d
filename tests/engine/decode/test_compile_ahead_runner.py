"""A runner compiles what its first steps launch, then what steps of other numbers of rows do, and launches
none of it."""

import pytest
import torch

from qerl.engine.decode.runner import DecodeRunner
from qerl.kernels.runtime import nvrtc
from qerl.kernels.runtime.compile_ahead import BackgroundCompiler
from qerl.kernels.runtime.nvrtc import compiled


class Sampler:
    is_capturable = False


def test_the_kernels_of_the_first_batch_come_first_and_the_others_while_it_runs(tmp_path, monkeypatch):
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
    heads = [32 * rows for rows in (1, 2, 3, 4)]
    paths = [nvrtc.cubin_path("rotary.cu", {"HEAD": head, "THREADS": 128}, "sm_86") for head in heads]
    order = []
    start = BackgroundCompiler.start

    def started(self):
        order.append([path.exists() for path in paths])
        order.append([dict(each.defines)["HEAD"] // 32 for each in self._find()])
        start(self)

    monkeypatch.setattr(BackgroundCompiler, "start", started)
    report, compiler = runner.compile_ahead(num_samples=3, max_samples=4)
    assert (report.num_kernels, report.num_compiled) == (1, 1) and report.compile_s > 0
    assert order == [[False, False, True, False], [3, 2, 4, 1]]
    compiler.wait()
    assert all(path.exists() for path in paths)
    report, _ = runner.compile_ahead(num_samples=9, max_samples=9)
    assert report.num_compiled == 0
