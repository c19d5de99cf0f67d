"""Count the GPU memory of this process: what torch allocates, and what is mapped outside torch.

    peak = max over time of (torch's + mapped)

torch counts, and limits (`torch.cuda.set_per_process_memory_fraction`), only its own memory. Its counters are
global to the process, and so is the one count that this module adds.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(slots=True)
class _OutsideTorch:
    """Bytes mapped now, and the peaks up to the last change of that; torch counts the peaks since then."""

    mapped_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0


_OUTSIDE: dict[torch.device, _OutsideTorch] = {}


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy to the device without waiting for what it still computes."""
    is_cuda = torch.device(device).type == "cuda" and not x.is_cuda
    return x.pin_memory().to(device, non_blocking=True) if is_cuda else x.to(device)


def memory_bytes(device: torch.device) -> float:
    """Return the bytes of the GPU that torch may use in this process; 0 on a CPU."""
    return allowed_bytes(device) if device.type == "cuda" and torch.cuda.is_available() else 0.0


def allowed_bytes(device: torch.device) -> float:
    """Return the bytes of the device that torch may use in this process."""
    device = numbered(device)
    return torch.cuda.get_per_process_memory_fraction(device) * torch.cuda.mem_get_info(device)[1]


def largest_doubling(number: int, limit: float) -> int:
    """Return the largest number * 2^k, k = 0, 1, ..., of at most the limit; the number itself if it is above:
    the tokens of a pass that some memory allows."""
    return number << max(0, int(limit // number).bit_length() - 1)


def check_limit(device: torch.device, num_bytes: int) -> None:
    """Raise torch.OutOfMemoryError if num_bytes more than torch has reserved exceed this process's limit."""
    if torch.cuda.memory_reserved(device) + num_bytes > allowed_bytes(device):
        raise torch.OutOfMemoryError(f"{num_bytes} bytes exceed this process's limit on the GPU")


@contextlib.contextmanager
def mapped(device: torch.device, num_bytes: int) -> Iterator[None]:
    """Count num_bytes as mapped inside the context, and lower torch's limit by as much."""
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    share = num_bytes / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(max(fraction - share, 0.0), device)
    _change(device, num_bytes)
    try:
        yield
    finally:
        _change(device, -num_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in use since `reset_peaks`."""
    outside = _outside(device)
    return max(outside.allocated_bytes, torch.cuda.max_memory_allocated(device) + outside.mapped_bytes)


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the peak including unused memory in torch's blocks."""
    outside = _outside(device)
    return max(outside.reserved_bytes, torch.cuda.max_memory_reserved(device) + outside.mapped_bytes)


def reset_peaks(device: torch.device) -> None:
    _OUTSIDE[numbered(device)] = _OutsideTorch(mapped_bytes=_outside(device).mapped_bytes)
    torch.cuda.reset_peak_memory_stats(device)


def describe_pieces(device: torch.device) -> str:
    """Say how torch's memory is divided, for a message about too little of it."""
    return pieces_of(torch.cuda.memory_snapshot(), numbered(device).index)


def pieces_of(segments: Sequence[Mapping[str, Any]], device_index: int) -> str:
    """The same from a snapshot of torch's segments: memory is lost in pieces where much is unused and the
    largest unused block is small."""
    segments = [segment for segment in segments if segment["device"] == device_index]
    blocks = [block for segment in segments for block in segment["blocks"]]
    unused = [block["size"] for block in blocks if block["state"] == "inactive"]
    used = sum(block["size"] for block in blocks) - sum(unused)
    largest = max(unused, default=0)
    return (
        f"{used / 1e9:.2f} GB in use, {sum(unused) / 1e9:.2f} GB unused in {len(unused)} pieces of"
        f" {len(segments)} segments, the largest of {largest / 1e9:.3f} GB"
    )


def _change(device: torch.device, num_bytes: int) -> None:
    """Change the mapped bytes: store the peaks so far and reset torch's."""
    _OUTSIDE[numbered(device)] = _OutsideTorch(
        mapped_bytes=_outside(device).mapped_bytes + num_bytes,
        allocated_bytes=peak_bytes(device),
        reserved_bytes=peak_reserved_bytes(device),
    )
    torch.cuda.reset_peak_memory_stats(device)


def _outside(device: torch.device) -> _OutsideTorch:
    return _OUTSIDE.get(numbered(device), _OutsideTorch())


def numbered(device: torch.device) -> torch.device:
    """Return the device with an index: the current device's if it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
