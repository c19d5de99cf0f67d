"""Time work on a GPU by replaying a CUDA graph between two events.

    ms = median of the replays,  p20_ms and p80_ms = their 20th and 80th percentile

The timed work must touch more memory than the L2 cache holds (50 MB on an H200), as all layers of a model do:
otherwise a replay finds data of the previous one in the cache.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import torch

from qerl.kernels.runtime.cuda_graph import record_graph

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
