"""Read a GPU's memory, and catch what does not fit."""

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from qerl.errors import UserError
from qerl.kernels.runtime.gpu_memory import describe_pieces, peak_bytes, peak_reserved_bytes, reset_peaks

R = TypeVar("R")


def cuda_device() -> torch.device:
    if not torch.cuda.is_available():
        raise UserError("bench needs a CUDA device, and PyTorch found none")
    return torch.device("cuda", torch.cuda.current_device())


class Meter:
    """Reads a GPU's memory as kernels/runtime/gpu_memory.py counts it; all figures are 0 on a CPU."""

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
        if isinstance(error, torch.OutOfMemoryError) and device.type == "cuda":
            message += f" ({describe_pieces(device)})"
    Meter(device).clear()  # after the error, whose traceback keeps tensors alive
    return None, message
