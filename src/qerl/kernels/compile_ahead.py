"""Fill the disk cache of compiled kernels in parallel, before the first of them is launched.

    report = compile_launched(lambda: forward(state, num_rows), device)

A dry run (nvrtc.py) tells which kernels that are, so that no list can be out of date. PyTorch's operations in
it run, on tensors that no kernel has filled: nothing that outlives the step may depend on them.

NVRTC releases Python's lock while it compiles, so threads suffice.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from qerl.kernels.architectures import architecture_name
from qerl.kernels.nvrtc import KernelVariant, cached_cubin, cubin_path, dry_run

_MOST_WORKERS = 16  # a compilation takes up to 0.2 GB


@dataclasses.dataclass(frozen=True, slots=True)
class CompileReport:
    """CompileReport(num_kernels=14, num_compiled=14, compile_s=2.1)"""

    num_kernels: int
    """Different files with definitions."""
    num_compiled: int
    """Number of these that were not in the cache."""
    compile_s: float

    def __str__(self) -> str:
        cached = self.num_kernels - self.num_compiled
        return (
            f"compiled {self.num_compiled} kernels in {self.compile_s:.1f} s, {cached} were in the disk cache"
        )


def compile_launched(
    step: Callable[[], object], device: torch.device, *, workers: int | None = None
) -> CompileReport:
    """Compile what a call of `step` would launch, without launching it."""
    with torch.no_grad(), dry_run() as variants:
        step()
    return compile_ahead(variants, device, workers=workers)


def compile_ahead(
    variants: Iterable[KernelVariant], device: torch.device, *, workers: int | None = None
) -> CompileReport:
    """Compile for this device what the cache does not have. workers: threads; None: one a CPU core.

    Raises RuntimeError with NVRTC's log if a file does not compile.
    """
    return compile_for(variants, architecture_name(torch.cuda.get_device_capability(device)), workers)


def compile_for(
    variants: Iterable[KernelVariant], architecture: str, workers: int | None = None
) -> CompileReport:
    """Do the same for an architecture such as sm_86; needs no GPU."""
    start = time.perf_counter()
    sources = list(dict.fromkeys((each.file, each.defines) for each in variants))
    missing = [
        (file, dict(defines))
        for file, defines in sources
        if not cubin_path(file, dict(defines), architecture).exists()
    ]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(workers or cores, _MOST_WORKERS), "compile") as pool:
        for future in [pool.submit(cached_cubin, *source, architecture) for source in missing]:
            future.result()
    return CompileReport(len(sources), len(missing), time.perf_counter() - start)
