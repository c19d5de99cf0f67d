"""A dry run compiles the portable head's product, which is Triton's, and launches nothing."""

import os
import subprocess
import sys

import pytest
import torch

_SCRIPT = """
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from qerl.formats import BF16
from qerl.kernels.head_portable import PortableHeadSample
from qerl.kernels.nvrtc import dry_run

driver.set_active(SimpleNamespace(  # stands for a GPU; it cannot launch
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 86, 32),
))
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=82)
meta, rows = torch.device("meta"), 8
weight = torch.empty(1024, 128, dtype=torch.bfloat16, device=meta)
head = PortableHeadSample(BF16(weight), rows, meta)
hidden = torch.empty(rows, 128, dtype=torch.bfloat16, device=meta)
keys = torch.empty(rows, dtype=torch.int64, device=meta)
with dry_run() as variants:
    head.draw(hidden, keys, keys.int(), torch.empty(1, device=meta))
print([variant.file for variant in variants])
"""


def test_a_dry_run_compiles_tritons_kernel_without_memory(tmp_path):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a driver stands for the GPU that is not there")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['head_finish.cu']\n"
    assert len(list(tmp_path.rglob("_chunk.cubin"))) == 1
