"""Capture launches in a CUDA graph with Python's cycle collector disabled.

The collector may free device memory or a graph, which invalidates a capture that is in progress on any stream
(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED).
"""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def record_graph(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: tuple[int, int] | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Iterator[None]:
    """Capture launches in the graph instead of running them; see torch.cuda.graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    finally:
        if was_enabled:
            gc.enable()
