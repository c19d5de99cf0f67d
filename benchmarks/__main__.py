"""Run `python -m benchmarks BENCHMARK` in a checkout."""

import sys
from collections.abc import Callable

from benchmarks.calibration import CalibrationOptions, bench_calibration
from benchmarks.demo import DemoOptions, bench_demo
from benchmarks.families import FamiliesOptions, print_families
from benchmarks.guesses import GuessesOptions, bench_guesses
from benchmarks.limits import LimitsOptions, bench_limits
from benchmarks.linear import LinearOptions, bench_linear
from benchmarks.matrix import MatrixOptions, print_matrix
from benchmarks.pages import TableOptions, write_tables
from benchmarks.parity import ParityOptions, bench_parity
from benchmarks.partial import PartialOptions, bench_partial
from benchmarks.peers.options import PeerOptions, bench_peer
from benchmarks.pictures import PicturesOptions, draw_pictures
from benchmarks.rounding import RoundingOptions, bench_rounding
from benchmarks.samplers import SamplersOptions, bench_samplers
from benchmarks.serve import ServeBenchOptions, bench_serve
from benchmarks.start import StartOptions, bench_start
from benchmarks.tile import TileOptions, bench_tile
from benchmarks.tinker import TinkerBenchOptions, bench_tinker
from benchmarks.vllm_rollout import VllmRolloutOptions, bench_vllm_rollout
from qerl.cli.arguments import check_known, parse_options, wants_help
from qerl.errors import RunError, UserError

USAGE = """\
usage: python -m benchmarks BENCHMARK [OPTIONS]

benchmarks:
  calibration   Measure what each part of a calibration adds, over one set of samples
  demo          Time the demo, whole, on this machine's CPU; needs no GPU
  families      Print which code computes each family of models; --write updates the page; needs no GPU
  guesses       Estimate the gain of n-gram speculation (tokens guessed from earlier text); needs no GPU
  limits        Measure the GPU's memory and matrix rates, from which floors are computed
  linear        Time the linears of a decode step beside other libraries
  matrix        Compile every CUDA kernel for every architecture and print what it uses; needs no GPU
  parity        Compare the engine's log-probabilities with the learner's
  partial       Time training steps with partial rollouts and without
  peer          Run one training job by qerl or by TRL, and answer the test problems afterwards
  pictures      Draw the pictures of README.md
  rounding      Measure what rounding a model to 4 bits changes: KL, agreement, seconds
  samplers      Train on several GPUs by torchrun and by Ray, and kill one of Ray's workers
  serve         Load `qerl serve` on loopback with one client, then with many
  start         Time a fresh process up to its first decode step and update, kernels cold and warm
  table         Print the tables of README.md and docs/; --write updates them
  tile          Time all tiles of the NVFP4 kernel and write the table that the kernel reads
  tinker        Measure `qerl tinker` beside `qerl train`, two clients, and adapters by row
  vllm-rollout  Run vLLM on the lengths of `qerl bench rollout`, where it is installed

Run 'python -m benchmarks BENCHMARK --help' for the options.
Rows are appended to benchmarks/results/GPU.jsonl; 'qerl bench decode', 'learn', 'rollout' and 'step' write
there too. calibration, peer, rounding, serve, start and vllm-rollout print theirs."""
BENCHMARKS: dict[str, tuple[type, Callable[..., None]]] = {
    "calibration": (CalibrationOptions, bench_calibration),
    "demo": (DemoOptions, bench_demo),
    "families": (FamiliesOptions, print_families),
    "guesses": (GuessesOptions, bench_guesses),
    "limits": (LimitsOptions, bench_limits),
    "linear": (LinearOptions, bench_linear),
    "matrix": (MatrixOptions, print_matrix),
    "pictures": (PicturesOptions, draw_pictures),
    "partial": (PartialOptions, bench_partial),
    "peer": (PeerOptions, bench_peer),
    "parity": (ParityOptions, bench_parity),
    "rounding": (RoundingOptions, bench_rounding),
    "samplers": (SamplersOptions, bench_samplers),
    "serve": (ServeBenchOptions, bench_serve),
    "start": (StartOptions, bench_start),
    "tile": (TileOptions, bench_tile),
    "tinker": (TinkerBenchOptions, bench_tinker),
    "table": (TableOptions, write_tables),
    "vllm-rollout": (VllmRolloutOptions, bench_vllm_rollout),
}


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or wants_help(arguments):
        print(USAGE)
        return
    try:
        name = check_known(arguments[0], BENCHMARKS, "benchmark")
        kind, bench = BENCHMARKS[name]
        help = bench.__doc__ or ""
        bench(parse_options(kind, arguments[1:], name, help=help, program="python -m benchmarks"))
    except (UserError, RunError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
