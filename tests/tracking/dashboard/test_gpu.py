"""GPU use as a fake nvidia-smi reports it."""

import pytest

from qerl.tracking.dashboard.gpu import GpuMonitor

SAID = """0, NVIDIA H200, 97, 1000, 143771, 612.34, 61
1, NVIDIA H200, [N/A], 0, 143771, [N/A], 35
No devices were found
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs an nvidia-smi of these lines and this exit code; every call leaves a line in `calls`."""

    def install(said, code=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho >> {tmp_path}/calls\ncat <<'END'\n{said}END\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "calls"

    return install


def test_each_gpu_is_read_and_what_is_not_known_is_none(installed):
    installed(SAID)
    first, second = GpuMonitor().now()
    assert first["name"] == "GPU 0, NVIDIA H200"
    assert [first[key] for key in ("busy_share", "watts", "celsius")] == pytest.approx([0.97, 612.34, 61])
    assert first["memory_gb"] == pytest.approx(1.048576)
    assert first["memory_total_gb"] == pytest.approx(150.755, abs=1e-3)
    assert second["busy_share"] is None and second["watts"] is None and second["memory_gb"] == 0


def test_it_is_asked_as_often_as_wanted_and_no_more(installed):
    calls = installed(SAID)
    gpus = GpuMonitor(every_s=60)
    assert gpus.now() == gpus.now() and calls.read_text() == "\n"
    hasty = GpuMonitor(every_s=0)
    hasty.now(), hasty.now()
    assert calls.read_text() == "\n" * 3


def test_a_driver_that_fails_is_no_gpu(installed):
    calls = installed(SAID, code=9)
    gpus = GpuMonitor(every_s=0)
    assert gpus.now() == gpus.now() == [] and calls.read_text() == "\n"


def test_a_machine_without_one_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert GpuMonitor().now() == []
