"""Measure decode, rollout, learner and step speed on this GPU."""

import importlib

from qerl.bench.options import (
    BenchDecodeOptions,
    BenchLearnOptions,
    BenchOptions,
    BenchRolloutOptions,
    BenchStepOptions,
    BenchTuneOptions,
)
from qerl.cli.arguments import check_known, parse_options, split_names, wants_help
from qerl.errors import require

USAGE = """\
usage: qerl bench BENCHMARK [OPTIONS]

Measure speed and memory on this GPU, with random weights in the shape of a real model.

benchmarks:
  decode   sampling: tokens/s, prefill included
  learn    one update: tokens/s, MFU and peak memory
  rollout  sampling of a training step, whose samples have different lengths: first and later calls, tails
  tune     the fastest tiles of the portable decode kernels on this GPU, for the engine to use
  step     a whole training step: sampling, update, publishing; --memory measures the peak memory of each step

Each case prints one line of JSON. In a checkout, the line is also appended to benchmarks/results/GPU.jsonl.
Run 'qerl bench BENCHMARK --help' for its options."""
BENCHMARKS: dict[str, tuple[type[BenchOptions | BenchTuneOptions], str]] = {
    "decode": (BenchDecodeOptions, "Measure sampling: tokens/s, prefill included."),
    "learn": (BenchLearnOptions, "Measure one update of the learner: tokens/s, MFU and peak memory."),
    "rollout": (BenchRolloutOptions, "Measure sampling where samples have different lengths."),
    "tune": (BenchTuneOptions, "Find and keep the fastest tiles of the portable decode kernels."),
    "step": (BenchStepOptions, "Measure a whole training step: sampling, update and publishing."),
}
"""Options and description; the function `bench` of the module of the same name measures."""


def run(arguments: list[str]) -> None:
    if wants_help(arguments):
        print(USAGE)
        return
    names, arguments = split_names(arguments)
    require(len(names) == 1, f"bench needs one benchmark: qerl bench {' | '.join(BENCHMARKS)}")
    name = check_known(names[0], BENCHMARKS, "benchmark")
    kind, description = BENCHMARKS[name]
    options = parse_options(kind, arguments, f"bench {name}", help=description)
    importlib.import_module(f"qerl.bench.{name}").bench(options)
