"""Measure what a GPU's memory and matrix units reach: `python -m benchmarks limits`.

    read_bytes_per_s   reading --gib GiB, by the fastest of PyTorch's reductions in READERS
    copy_bytes_per_s   copying them, reads and writes both counted
    flop_per_s         a bfloat16 product of 8192 x 8192 x 8192 by cuBLAS

Each is the median of --runs timings by CUDA events, of ten launches each. The floors of
`qerl.bench.roofline` are computed from the first and third figure.
"""

import dataclasses
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl.bench.measure import cuda_device
from qerl.bench.options import BenchOptions
from qerl.bench.record import row_writer
from qerl.config.check import check_positive

READERS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "sum of float32": (torch.float32, torch.sum),
    "sum of bfloat16": (torch.bfloat16, torch.sum),
    "largest int32": (torch.int32, torch.max),
    "sums of rows of float32": (torch.float32, lambda x: x.view(-1, 8192).sum(1)),
    "sums of rows of bfloat16": (torch.bfloat16, lambda x: x.view(-1, 8192).sum(1)),
}
_LAUNCHES, _WIDTH = 10, 8192


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LimitsOptions:
    gib: float = 4.0
    """GiB of the tensor that is read; more than the GPU's L2 cache holds."""

    runs: int = 5
    """Timings of each kind; the figures hold their median."""

    out: Path | None = None
    """File to append the row to; default: benchmarks/results/GPU.jsonl."""

    allow_dirty: bool = False
    """Measure a checkout with uncommitted changes; the row is marked dirty."""


def bench_limits(options: LimitsOptions) -> None:
    """Write the row of the GPU that is there. Raises UserError without one."""
    check_positive(options, "gib", "runs", prefix="--")
    device = cuda_device()
    rows = row_writer(BenchOptions(out=options.out, allow_dirty=options.allow_dirty))
    rows.add({"bench": "limits", **measure_limits(options, device)})


def measure_limits(options: LimitsOptions, device: torch.device) -> dict[str, Any]:
    """Return the fields of the row."""
    source_N = torch.zeros(max(1, int(options.gib * 1024)) << 20, dtype=torch.uint8, device=device)
    target_N = torch.empty_like(source_N)
    reads = {name: partial(read, source_N.view(dtype)) for name, (dtype, read) in READERS.items()}
    seconds = {name: _seconds(read, options.runs) for name, read in reads.items()}
    reader = min(seconds, key=lambda name: seconds[name])
    copy_s = _seconds(partial(target_N.copy_, source_N), options.runs)
    x, y = (torch.randn(_WIDTH, _WIDTH, device=device).bfloat16() for _ in range(2))
    product_s = _seconds(partial(torch.mm, x, y), options.runs)
    return {
        "read_bytes_per_s": round(source_N.numel() / seconds[reader]),
        "reader": reader,
        "copy_bytes_per_s": round(2 * source_N.numel() / copy_s),
        "flop_per_s": round(2 * _WIDTH**3 / product_s),
    }


def _seconds(work: Callable[[], Any], num_runs: int) -> float:
    """Return the median of num_runs timings of a launch, after a timing that does not count."""
    return statistics.median([_time_launches(work) for _ in range(num_runs + 1)][1:])


def _time_launches(work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_LAUNCHES):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _LAUNCHES
