"""How much of a GPU's memory this process takes: what torch allots, and what is mapped beside torch.

    peak = max over time of (torch's + mapped)

torch counts, and limits (`torch.cuda.set_per_process_memory_fraction`), its own alone. Its counters belong to
the process, and so does the one count that is kept here beside them.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch


@dataclasses.dataclass(slots=True)
class _OutsideTorch:
    """What is mapped now, and the peaks until it last changed: torch's own count from there."""

    mapped_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0


_BESIDE: dict[torch.device, _OutsideTorch] = {}


def allowed_bytes(device: torch.device) -> float:
    """What torch may take of the device in this process."""
    device = numbered(device)
    return torch.cuda.get_per_process_memory_fraction(device) * torch.cuda.mem_get_info(device)[1]


def check_limit(device: torch.device, num_bytes: int) -> None:
    """torch.OutOfMemoryError if so many bytes beside what torch holds are more than this process may take."""
    if torch.cuda.memory_reserved(device) + num_bytes > allowed_bytes(device):
        raise torch.OutOfMemoryError(f"{num_bytes} bytes are beyond this process's share of the GPU")


@contextlib.contextmanager
def mapped(device: torch.device, num_bytes: int) -> Iterator[None]:
    """So many bytes of the device are mapped in here: they count, and torch may take so many less."""
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
    """The most in use at once since `reset_peaks`."""
    beside = _beside(device)
    return max(beside.allocated_bytes, torch.cuda.max_memory_allocated(device) + beside.mapped_bytes)


def peak_reserved_bytes(device: torch.device) -> int:
    """The same with what lay unused in torch's blocks."""
    beside = _beside(device)
    return max(beside.reserved_bytes, torch.cuda.max_memory_reserved(device) + beside.mapped_bytes)


def reset_peaks(device: torch.device) -> None:
    _BESIDE[numbered(device)] = _OutsideTorch(mapped_bytes=_beside(device).mapped_bytes)
    torch.cuda.reset_peak_memory_stats(device)


def _change(device: torch.device, num_bytes: int) -> None:
    """Of what is mapped; torch's peaks begin anew, those so far are kept here."""
    _BESIDE[numbered(device)] = _OutsideTorch(
        mapped_bytes=_beside(device).mapped_bytes + num_bytes,
        allocated_bytes=peak_bytes(device),
        reserved_bytes=peak_reserved_bytes(device),
    )
    torch.cuda.reset_peak_memory_stats(device)


def _beside(device: torch.device) -> _OutsideTorch:
    return _BESIDE.get(numbered(device), _OutsideTorch())


def numbered(device: torch.device) -> torch.device:
    """The same with its number: the current one's where it has none."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
