"""Times work on a GPU: recorded once in a CUDA graph, then replayed between two events.

    ms = median of the replays,  p20_ms and p80_ms = their 20th and 80th percentile

What is timed must touch more memory than the L2 cache holds (50 MB on an H200), as all layers of a model do:
a replay then finds nothing of the one before it.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch

from qerl.errors import UserError

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
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
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
