"""Times work on a GPU, recorded once in a CUDA graph and replayed between two events, and reads its memory.

    ms = median of the replays,  p20_ms and p80_ms = their 20th and 80th percentile

What is timed must touch more memory than the L2 cache holds (50 MB on an H200), as all layers of a model do:
a replay then finds nothing of the one before it.
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
        raise UserError("bench needs a CUDA device, and torch finds none")
    return torch.device("cuda", torch.cuda.current_device())


def graph_times(work: Callable[[], object], runs: int) -> Times:
    """Of `work`, whose launches all go to the current stream. It runs a few times before it is recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes what the work reads
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
    """Of a GPU's memory as qerl/memory.py counts it; on a CPU there is nothing to read, and all is 0."""

    def __init__(self, device: torch.device):
        self._device = device

    def clear(self) -> None:
        """Give back what is no longer referred to."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def start(self) -> None:
        """Peaks count from here."""
        self.wait()
        if self._device.type == "cuda":
            reset_peaks(self._device)

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def cap(self, gb: float | None) -> None:
        """Nothing is allotted beyond it; None takes the cap off."""
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            fraction = 1.0 if gb is None else min(gb * 1e9 / total, 1.0)
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def peak_gb(self) -> float:
        is_gpu = self._device.type == "cuda"
        return round(peak_bytes(self._device) / 1e9, 2) if is_gpu else 0.0

    def reserved_gb(self) -> float:
        """The most that was held, what lay unused in torch's blocks included: what a cap is held against."""
        is_gpu = self._device.type == "cuda"
        return round(peak_reserved_bytes(self._device) / 1e9, 2) if is_gpu else 0.0

    def say(self, line: str) -> None:
        """Not among the rows."""
        print(line, file=sys.stderr, flush=True)


def attempt(work: Callable[[], R], device: torch.device) -> tuple[R | None, str]:
    """(what it gives, ""), or (None, the first line of what it lacked): out of memory shows as several
    errors of CUDA's and as one of ours."""
    try:
        return work(), ""
    except (RuntimeError, UserError) as error:
        lines = str(error).splitlines() or [""]
        said = f"{type(error).__name__}: {lines[0][:300]}"
    Meter(device).clear()  # once the error no longer refers to anything
    return None, said
