"""Time the demo from its command to its result on this machine's CPU: `python -m benchmarks demo`.

    wall_s, cpu_s   of the whole process: imports, loading, evaluations, steps; cpu_s is of all its threads
    train_s         wall time of the steps
    load_average    of the last minute before the run: above 0.5 other programs have part of the cores, and
                    wall times are not those of an idle machine

With one thread, cpu_s is about the wall time of one idle core, however busy the machine is. avx2 keeps torch,
oneDNN and MKL from AVX-512 and computes in fp32, as `model.dtype auto` does on such a CPU. Rows are appended
to benchmarks/results/cpu/demo.jsonl.
"""

import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from qerl.bench.record import RESULTS, ROOT, source
from qerl.config.check import check_positive
from qerl.errors import RunError
from qerl.tracking.provenance import version

_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_FIGURES = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "train_s")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    recipe: Literal["demo", "demo_long"] = "demo"
    """Recipe to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """A run for each."""

    threads: int = 2
    """Threads of torch."""

    instructions: Literal["native", "avx2"] = "native"
    """Vector instructions that the CPU's libraries may use."""

    allow_dirty: bool = False
    """Measure with uncommitted changes; the rows are then only printed."""

    def __post_init__(self):
        check_positive(self, "threads")


def bench_demo(options: DemoOptions) -> None:
    """Write a row for each seed."""
    commit, is_dirty = source(ROOT, allow_dirty=options.allow_dirty)
    file = ROOT / RESULTS / "cpu" / "demo.jsonl"
    for seed in options.seeds:
        line = json.dumps(measure(options, seed) | {"commit": commit, "is_dirty": is_dirty})
        print(line, flush=True)
        if is_dirty is False:
            with file.open("a") as rows:
                rows.write(line + "\n")


def measure(options: DemoOptions, seed: int, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the row of one run in a process of its own. more: options of the run."""
    is_avx2 = options.instructions == "avx2"
    load_average = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "qerl", "train", options.recipe, "--out", folder + "/run", "--json"]
        command += ["--seed", str(seed), *(["--model.dtype", "fp32"] if is_avx2 else []), *more]
        threads = {"OMP_NUM_THREADS": str(options.threads)}
        figures, wall_s, cpu_s = _timed(command, os.environ | threads | (_AVX2 if is_avx2 else {}))
        dtype = json.loads(Path(folder, "run", "run.json").read_text())["config"]["model"]["dtype"]
    return {
        "bench": "demo",
        "recipe": options.recipe,
        "seed": seed,
        "cpu": cpu_name(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "instructions": options.instructions,
        "dtype": dtype,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "load_average": load_average,
        **{name: figures[name] for name in _FIGURES if name in figures},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "qerl": version("qerl"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _timed(command: list[str], environment: Mapping[str, str]) -> tuple[dict[str, Any], float, float]:
    """Return the result that the command prints last, its wall time and its CPU time. What it prints is shown
    on stderr."""
    before, begin, line = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), ""
    with subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
    if process.returncode != 0:
        raise RunError(f"demo: the run ended with {process.returncode}: {line.strip()}")
    after, end = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    cpu_s = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    return json.loads(line), end - begin, cpu_s


def cpu_name(cpuinfo: str) -> str:
    """Return "AMD EPYC, family 25 model 17" of the text of /proc/cpuinfo; a cloud's name alone is vague."""
    parts = (line.partition(":") for line in cpuinfo.splitlines())
    facts = {name.strip(): value.strip() for name, _, value in parts}
    name = facts.get("model name", platform.machine())
    return f"{name}, family {facts['cpu family']} model {facts['model']}" if "model" in facts else name
