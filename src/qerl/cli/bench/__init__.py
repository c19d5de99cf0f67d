"""Measure decode, learner and step speed on this GPU."""

from qerl.cli.arguments import check_known, parse_options, split_names, wants_help
from qerl.cli.bench.options import BenchDecodeOptions, BenchLearnOptions, BenchStepOptions
from qerl.config.renamed import BENCHES as FORMER_BENCHES
from qerl.errors import UserError

USAGE = """\
usage: qerl bench BENCHMARK [OPTIONS]

Measure speed and memory on this GPU, with random weights in the shape of a real model.

benchmarks:
  decode   sampling: tokens/s, prefill included
  learn    one update: tokens/s, MFU and peak memory
  step     a whole training step: sampling, update, publishing; --memory measures the peak memory of each step

Each case prints one line of JSON. In a checkout, the line is also appended to benchmarks/results/GPU.jsonl.
Run 'qerl bench BENCHMARK --help' for its options."""
BENCHMARKS = ("decode", "learn", "step")


def run(arguments: list[str]) -> None:
    if wants_help(arguments):
        print(USAGE)
        return
    names, arguments = split_names(arguments)
    if len(names) != 1:
        raise UserError(f"bench needs one benchmark: qerl bench {' | '.join(BENCHMARKS)}")
    if names[0] in FORMER_BENCHES:
        raise UserError(f"qerl bench {names[0]} is now {FORMER_BENCHES[names[0]]}")
    name = check_known(names[0], BENCHMARKS, "benchmark")
    if name == "decode":
        _decode(arguments)
    elif name == "learn":
        _learn(arguments)
    else:
        _step(arguments)


def _decode(arguments: list[str]) -> None:
    options = parse_options(
        BenchDecodeOptions,
        arguments,
        "bench decode",
        description="Measure sampling: tokens/s, prefill included.",
    )
    from qerl.cli.bench.decode import bench_decode

    bench_decode(options)


def _learn(arguments: list[str]) -> None:
    options = parse_options(
        BenchLearnOptions,
        arguments,
        "bench learn",
        description="Measure one update of the learner: tokens/s, MFU and peak memory.",
    )
    from qerl.cli.bench.learn import bench_learn

    bench_learn(options)


def _step(arguments: list[str]) -> None:
    options = parse_options(
        BenchStepOptions,
        arguments,
        "bench step",
        description="Measure a whole training step: sampling, update and publishing.",
    )
    from qerl.cli.bench.step import bench_step

    bench_step(options)
