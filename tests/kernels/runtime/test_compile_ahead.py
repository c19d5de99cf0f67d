"""Kernels are noted without being launched, and compiled in parallel into the disk cache."""

import contextlib
import fcntl
import threading
import time

import pytest
import torch

from qerl.kernels.runtime import nvrtc
from qerl.kernels.runtime.compile_ahead import compile_ahead, compile_for
from qerl.kernels.runtime.compile_tally import locked
from qerl.kernels.runtime.nvrtc import KernelVariant, compiled, dry_run
from qerl.kernels.tiles.lora_shrink_portable import PortableLoraShrink
from qerl.tasks.worker_process import fork_process

CPU = torch.device("cpu")


def variant(head):
    return KernelVariant("rotary.cu", "rotate", (("HEAD", head), ("THREADS", 128)), 128, 0)


def launch(head):
    kernel = compiled("rotary.cu", "rotate", CPU, {"THREADS": 128, "HEAD": head})
    kernel.launch(grid=1, block_threads=128, parameters=())


def test_a_dry_run_notes_each_variant_once_in_the_order_of_launches():
    with dry_run() as variants:
        for head in (128, 64, 128):
            launch(head)
    assert list(variants) == [variant(128), variant(64)]


def test_after_a_dry_run_a_launch_is_one_again():
    with dry_run():
        launch(64)
    with pytest.raises(AssertionError):  # a launch needs a GPU
        launch(64)


def test_a_lock_ends_with_its_block_also_where_a_process_was_forked_inside(tmp_path):
    """As a worker for rewards is, while a thread compiles: no other rank waits for the worker's end."""
    with contextlib.ExitStack() as stack:
        with locked(tmp_path / "lock"):
            waiting = stack.enter_context(open(tmp_path / "lock"))
            stack.callback(fork_process(time.sleep, 60).kill)
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_dry_run_is_its_threads_own():
    failed = []

    def other():
        try:
            launch(64)
        except AssertionError as error:
            failed.append(error)

    with dry_run() as variants:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert failed and not variants


def test_compiling_ahead_fills_the_cache_and_leaves_what_is_there(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    variants = [variant(64), variant(128), variant(64)]
    cold, warm = (compile_for(variants, "sm_86", workers=2) for _ in range(2))
    assert (cold.num_kernels, cold.num_compiled) == (2, 2)
    assert (warm.num_kernels, warm.num_compiled) == (2, 0) and warm.compile_s < cold.compile_s
    path = nvrtc.cubin_path("rotary.cu", {"HEAD": 64, "THREADS": 128}, "sm_86")
    assert path.parent == tmp_path / "cubin" and len(list(path.parent.iterdir())) == 2
    assert path.read_bytes() == nvrtc.compile_cubin("rotary.cu", {"HEAD": 64, "THREADS": 128}, "sm_86")


def test_compiling_ahead_says_what_does_not_compile(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"rotary\.cu.*HEAD"):
        compile_for([KernelVariant("rotary.cu", "rotate", (("THREADS", 128),), 128, 0)], "sm_86")
    assert not list(tmp_path.rglob("*.cubin"))


def test_the_compiler_lets_other_threads_run():
    """Otherwise threads would not compile in parallel."""
    pytest.importorskip("cuda.bindings.nvrtc")
    ticks, is_done = 0, threading.Event()

    def compile_one():
        nvrtc.compile_cubin("logprob.cu", {"THREADS": 1024}, "sm_86")
        is_done.set()

    thread = threading.Thread(target=compile_one)
    thread.start()
    while not is_done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    assert ticks > 10  # 0.1 s and more


def test_what_a_step_would_launch_is_compiled_and_not_launched(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with dry_run() as variants:
        launch(64), launch(80), launch(64)
    report = compile_ahead(variants, CPU, workers=2)
    assert (report.num_kernels, report.num_compiled) == (2, 2)
    assert nvrtc.cubin_path("rotary.cu", {"HEAD": 80, "THREADS": 128}, "sm_89").exists()


@pytest.mark.gpu
def test_a_step_after_compiling_ahead_compiles_nothing(tmp_path, monkeypatch, rng):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    device, a = torch.device("cuda"), torch.randn(32, 896, generator=rng).bfloat16().cuda()
    h, weight = torch.randn(9, 896, generator=rng).cuda(), torch.ones(896).cuda()
    kernels = PortableLoraShrink(device)
    with dry_run() as variants:
        kernels.norm_shrink(h, weight, None, 1e-6, a, 1.0)
    report = compile_ahead(variants, device)
    assert report.num_compiled == report.num_kernels == 2
    want = PortableLoraShrink(device).norm_shrink(h, weight, None, 1e-6, a, 1.0)

    def fail(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "compile_cubin", fail)
    got = kernels.norm_shrink(h, weight, None, 1e-6, a, 1.0)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
