"""Copies in host memory of what the cache holds of unfinished samples, for the call that continues them.

    of a prompt    its pages, those of its window, its recurrent states; once for its samples
    of a sample    its pages after the prompt's full ones, those of its window, its recurrent states

Put back into pages and slots of the next call, they are not computed again. They are those of the weights
that computed them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.gpu_memory import sent
from qerl.kernels.host_memory import usable_host_bytes

_PIECE_BYTES = 1 << 21


class HostPieces:
    """Pieces of host memory, pinned for a GPU, that are used again once they are given back.

    Pinning takes a second for 1.3 GB (H200), and torch's own cache of pinned memory is emptied whenever a
    CUDA graph is recorded.
    """

    def __init__(self, device: torch.device):
        self.num_made = 0
        self._is_pinned, self._free, self._left_bytes = device.type == "cuda", [], 0.0

    def look(self) -> None:
        """Look how much more memory the host has."""
        self._left_bytes = usable_host_bytes()

    def take(self, num_bytes: int) -> list[Tensor] | None:
        """Return pieces for so many bytes; None if the host lacks memory for them."""
        num = -(-num_bytes // _PIECE_BYTES)
        num_new = max(num - len(self._free), 0)
        if num_new * _PIECE_BYTES > self._left_bytes:
            return None
        self.num_made, self._left_bytes = self.num_made + num_new, self._left_bytes - num_new * _PIECE_BYTES
        new = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned) for _ in range(num_new)
        ]
        return new + [self._free.pop() for _ in range(num - num_new)]

    def give(self, pieces: list[Tensor]) -> None:
        """Give pieces back; the current stream finishes copying from them before it writes to them."""
        self._free += pieces


class CachedSpan(NamedTuple):
    """Consecutive positions of a sequence, and where they are cached."""

    positions: range
    pages: list[int]
    """From the sequence's first position on."""
    windowed: dict[int, int]
    """Pages of layers with a window, by their place in the sequence."""
    slot: list[int]
    """That of the recurrent states after the last position; empty if no layer has any."""

    def own_pages(self, page_tokens: int) -> list[int]:
        """Return the pages from that of the first position to that of the last."""
        first, stop = self.positions.start // page_tokens, -(-self.positions.stop // page_tokens)
        return self.pages[first:stop]


class CarriedCache:
    """A span's contents: x[:, indices] of tensors [L, n, ...] of pages or slots, one after another."""

    def __init__(self, host: HostPieces, pieces: list[Tensor], shapes: list[torch.Size], places: list[int]):
        """shapes: of the tensors' bytes. places: those of the windowed pages."""
        self.places, self._host, self._pieces, self._shapes = places, host, pieces, shapes

    @classmethod
    def of(
        cls, host: HostPieces, selected: list[tuple[Tensor, list[int]]], places: list[int]
    ) -> "CarriedCache | None":
        """Copy these tensors' pages or slots; a GPU's copies are complete when it has been waited for. Return
        None if the host lacks memory."""
        found = [_bytes_of(x).index_select(1, _indices(indices, x.device)) for x, indices in selected]
        flat = torch.cat([x.flatten() for x in found])
        pieces = host.take(len(flat))
        if pieces is None:
            return None
        for start, piece in zip(range(0, len(flat), _PIECE_BYTES), pieces, strict=True):
            part = flat[start : start + _PIECE_BYTES]
            piece[: len(part)].copy_(part, non_blocking=True)
        return cls(host, pieces, [x.shape for x in found], places)

    def take(self, device: torch.device) -> list[Tensor]:
        """Return the bytes that were selected of each tensor. Once: then the memory is used for others."""
        sizes = [shape.numel() for shape in self._shapes]
        assert self._pieces or not any(sizes), "a carried cache was put back before"
        flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        for part, piece in zip(flat.split(_PIECE_BYTES), self._pieces, strict=bool(self._pieces)):
            part.copy_(piece, non_blocking=True)
        self._release()
        parts = flat[: sum(sizes)].split(sizes)
        return [x.view(shape) for x, shape in zip(parts, self._shapes, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return len(self._pieces) * _PIECE_BYTES

    def _release(self) -> None:
        self._host.give(self._pieces)
        self._pieces = []

    def __del__(self):
        self._release()


def write(x: Tensor, indices: list[int], copy: Tensor) -> None:
    """Write bytes to x[:, indices]."""
    _bytes_of(x).index_copy_(1, _indices(indices, x.device), copy)


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _indices(indices: list[int], device: torch.device) -> Tensor:
    return sent(torch.tensor(indices, dtype=torch.long), device)
