"""Records launches into a CUDA graph, with the collector of cycles at rest.

What it collects may hold memory or a graph of the device, and freeing those while any stream records ends the
recording (CUDA_ERROR_STREAM_CAPTURE_INVALIDATED).
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
    """What is launched in here goes into the graph and does not run; see torch.cuda.graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    finally:
        if was_enabled:
            gc.enable()
