"""Time work on a GPU by replaying a CUDA graph between two events, and read the GPU's memory.

    ms = median of the replays,  p20_ms and p80_ms = their 20th and 80th percentile

The timed work must touch more memory than the L2 cache holds (50 MB on an H200), as all layers of a model do:
otherwise a replay finds data of the previous one in the cache.
"""

import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from qerl.errors import UserError
from qerl.kernels.cuda_graph import record_graph
from qerl.kernels.gpu_memory import peak_bytes, peak_reserved_bytes, reset_peaks

R = TypeVar("R")
_WARM_UP_RUNS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Times(ms=1.39, p20_ms=1.388, p80_ms=1.394, runs=11)."""

    ms: float
    p20_ms: float
    p80_ms: float
    runs: int


def summary(times_ms: Sequence[float]) -> Times:
    cuts = statistics.quantiles(times_ms, n=5, method="inclusive") if len(times_ms) > 1 else [times_ms[0]] * 4
    return Times(ms=statistics.median(times_ms), p20_ms=cuts[0], p80_ms=cuts[3], runs=len(times_ms))


def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        raise UserError("bench needs a CUDA device, and PyTorch found none")
    return torch.device("cuda", torch.cuda.current_device())


def graph_times(work: Callable[[], object], runs: int) -> Times:
    """Time `work`, which must launch on the current stream; it runs once before it is recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which writes the inputs of the work
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with record_graph(graph, stream=stream):
            work()
    for _ in range(_WARM_UP_RUNS):
        graph.replay()
    return summary([_replay_ms(graph) for _ in range(runs)])


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Meter:
    """Reads a GPU's memory as kernels/gpu_memory.py counts it; all figures are 0 on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def clear(self) -> None:
        """Free unreferenced memory."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def start(self) -> None:
        """Reset the peaks."""
        self.wait()
        if self._device.type == "cuda":
            reset_peaks(self._device)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def cap(self, gb: float | None) -> None:
        """Limit PyTorch's allocations to this much memory; None removes the limit."""
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            fraction = 1.0 if gb is None else min(gb * 1e9 / total, 1.0)
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def peak_gb(self) -> float:
        is_gpu = self._device.type == "cuda"
        return round(peak_bytes(self._device) / 1e9, 2) if is_gpu else 0.0

    def reserved_gb(self) -> float:
        """Return the peak of reserved memory, with unused blocks of PyTorch's allocator; a cap limits it."""
        is_gpu = self._device.type == "cuda"
        return round(peak_reserved_bytes(self._device) / 1e9, 2) if is_gpu else 0.0

    def say(self, line: str) -> None:
        """Print a line to stderr; rows go to stdout."""
        print(line, file=sys.stderr, flush=True)


def attempt(work: Callable[[], R], device: torch.device) -> tuple[R | None, str]:
    """Return (result, ""), or (None, first line of the error): running out of memory raises several kinds of
    RuntimeError, and our own UserError."""
    try:
        return work(), ""
    except (RuntimeError, UserError) as error:
        lines = str(error).splitlines() or [""]
        message = f"{type(error).__name__}: {lines[0][:300]}"
    Meter(device).clear()  # after the error, whose traceback keeps tensors alive
    return None, message
