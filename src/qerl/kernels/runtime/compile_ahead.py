"""Fill the disk cache of compiled kernels in parallel, before the first of them is launched.

    report = compile_ahead(variants, device)
    BackgroundCompiler(lambda: planned_kernels(...), "sm_90a").start()      while weights are read

A dry run (nvrtc.py) tells which kernels that are, so that no list can be out of date. PyTorch's operations in
it run, on tensors that no kernel has filled: nothing that outlives the step may depend on them.

NVRTC releases Python's lock while it compiles, so threads suffice. What two threads or processes need is
compiled once (compile_tally.py: locked).
"""

import collections
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from qerl.kernels.runtime.architectures import architecture_name
from qerl.kernels.runtime.compile_tally import TALLY, CompileReport
from qerl.kernels.runtime.nvrtc import KernelVariant, cached_cubin, cubin_path

_Source = tuple[str, dict[str, int]]
_MAX_WORKERS = 16  # a compilation takes up to 0.2 GB


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
    start, sources = time.perf_counter(), _sources(variants)
    missing = _missing(sources, architecture)
    workers = min(workers or _num_cores(), _MAX_WORKERS)
    with TALLY.waiting(), ThreadPoolExecutor(workers, "compile") as pool:
        for future in [pool.submit(cached_cubin, *source, architecture) for source in missing]:
            future.result()
    return CompileReport(len(sources), len(missing), time.perf_counter() - start)


class BackgroundCompiler:
    """Compile in threads while the caller does something else, such as reading weights.

    Its errors stop it and nothing else: the run compiles what it launches anyway, and meets them there.
    TALLY's report names them. When the main thread ends, by Ctrl-C too, no further compilation begins.
    """

    def __init__(
        self, find: Callable[[], Iterable[KernelVariant]], architecture: str, *, workers: int | None = None
    ):
        """find: return the kernels; called in a thread. workers: threads; None: one a CPU core but one."""
        self._find, self._architecture = find, architecture
        self._left: collections.deque[_Source] = collections.deque()
        self._num_workers = workers or min(max(_num_cores() - 1, 1), _MAX_WORKERS)
        self._first = threading.Thread(target=self._run, name="compile")

    def start(self) -> None:
        self._first.start()

    def wait(self) -> None:
        """Return when all is compiled or an error has stopped it."""
        self._first.join()

    def _run(self) -> None:
        try:
            self._left.extend(_missing(_sources(self._find()), self._architecture))
        except Exception as error:  # this part only saves time; whatever is wrong shows in the run itself
            TALLY.note_error(error)
        others = [threading.Thread(target=self._work, name="compile") for _ in range(self._num_workers - 1)]
        for thread in others:
            thread.start()
        self._work()
        for thread in others:
            thread.join()

    def _work(self) -> None:
        main = threading.main_thread()
        while main.is_alive():
            try:
                source = self._left.popleft()
            except IndexError:
                return
            try:
                cached_cubin(*source, self._architecture)
            except Exception as error:
                self._left.clear()
                TALLY.note_error(error)


def _sources(variants: Iterable[KernelVariant]) -> list[_Source]:
    """Return the different files with definitions, in order."""
    different = dict.fromkeys((each.file, each.defines) for each in variants)
    return [(file, dict(defines)) for file, defines in different]


def _missing(sources: list[_Source], architecture: str) -> list[_Source]:
    """Return those that the cache does not have."""
    return [source for source in sources if not cubin_path(*source, architecture).exists()]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
