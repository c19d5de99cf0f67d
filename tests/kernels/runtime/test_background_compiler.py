"""Kernels are compiled in the background, each once, and nothing that goes wrong there ends a run."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from qerl.kernels.runtime import nvrtc
from qerl.kernels.runtime.compile_ahead import BackgroundCompiler, compile_for
from qerl.kernels.runtime.compile_tally import CompileReport, CompileTally
from qerl.kernels.runtime.nvrtc import KernelVariant


def variants(*heads):
    return [KernelVariant("rotary.cu", "rotate", (("HEAD", n), ("THREADS", 128)), 128, 0) for n in heads]


@pytest.fixture
def tally(tmp_path, monkeypatch):
    """An empty cache, and counts that begin with it."""
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("QERL_CACHE", str(tmp_path))
    own = CompileTally()
    for module in ("nvrtc", "compile_ahead"):
        monkeypatch.setattr(f"qerl.kernels.runtime.{module}.TALLY", own)
    return own


def started(find, workers=2):
    compiler = BackgroundCompiler(find, "sm_86", workers=workers)
    compiler.start()
    return compiler


def test_what_both_need_is_compiled_once(tally, tmp_path, monkeypatch):
    compiled, compile_cubin = [], nvrtc.compile_cubin

    def slowly(file, defines, architecture):
        compiled.append(defines["HEAD"])
        time.sleep(0.2)  # both reach the same kernel
        return compile_cubin(file, defines, architecture)

    monkeypatch.setattr(nvrtc, "compile_cubin", slowly)
    compiler = started(lambda: variants(64, 80, 96))
    compile_for(variants(64, 80), "sm_86", workers=2)
    compiler.wait()
    assert sorted(compiled) == [64, 80, 96] and len(list(tmp_path.rglob("*.cubin"))) == 3
    assert len(list((tmp_path / "cubin").iterdir())) == 3  # no lock is left
    report = tally.report()
    assert (report.num_kernels, report.num_compiled, report.error) == (3, 3, None)
    assert report.waited_s > 0 and report.compile_s > 0


def test_the_cubins_are_those_of_a_compilation_by_the_run(tally):
    started(lambda: variants(64)).wait()
    defines = {"HEAD": 64, "THREADS": 128}
    assert nvrtc.cached_cubin("rotary.cu", defines, "sm_86") == nvrtc.compile_cubin(
        "rotary.cu", defines, "sm_86"
    )
    assert tally.report().waited_s == 0


def test_errors_end_the_background_alone(tally):
    def fail():
        raise ValueError("no such shape\nand more")

    started(fail).wait()
    assert tally.report() is None  # nothing was compiled
    broken = KernelVariant("rotary.cu", "rotate", (("THREADS", 128),), 128, 0)
    started(lambda: [*variants(64), broken, *variants(80, 96, 112)], workers=1).wait()
    assert tally.report().num_compiled == 1
    assert str(tally.report()).endswith("; not while weights were read: ValueError: no such shape")


def test_without_the_compiler_the_background_ends(tally, monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(nvrtc, "cubin_path", missing)
    started(lambda: variants(64)).wait()
    assert tally.report() is None


def test_the_line_about_a_run_says_how_long_it_waited():
    line = "compiled 2 kernels in 1.3 s, 1 were in the disk cache"
    assert str(CompileReport(3, 2, 1.26)) == line
    assert str(CompileReport(3, 2, 1.26, 0.5)) == f"{line}; the run waited 0.5 s for them"


def test_the_time_of_compiling_is_that_with_at_least_one(tmp_path):
    tally, both = CompileTally(), threading.Barrier(2)

    def compile_one(name):
        with tally.compiling(tmp_path / name):
            both.wait()
            time.sleep(0.1)

    threads = [threading.Thread(target=compile_one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.use(tmp_path / "c")
    report = tally.report()
    assert (report.num_kernels, report.num_compiled) == (3, 2) and report.compile_s >= 0.1
    start_s = time.perf_counter()
    with tally.waiting():
        time.sleep(0.01)
    assert 0.01 <= tally.report().waited_s <= time.perf_counter() - start_s


_INTERRUPTED = """
import sys, time
from qerl.kernels.runtime.compile_ahead import BackgroundCompiler
from qerl.kernels.runtime.nvrtc import KernelVariant

each = [KernelVariant("logprob.cu", "logprob", (("THREADS", 32 * n),), 32 * n, 0) for n in range(1, 33)]
BackgroundCompiler(lambda: each, "sm_86", workers=2).start()
print("started", flush=True)
time.sleep(600)
"""


def test_after_an_interrupt_no_further_compilation_begins(tally, tmp_path):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", _INTERRUPTED], **options)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    deadline_s = time.monotonic() + 60
    while not list(tmp_path.rglob("*.cubin")) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in stderr
    assert 1 <= len(list(tmp_path.rglob("*.cubin"))) < 16
