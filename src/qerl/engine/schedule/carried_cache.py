"""Copies in host memory of what the cache holds of unfinished samples, for the call that continues them.

    of a prompt    its pages, those of its window, its recurrent states; once for its samples
    of a sample    its pages after the prompt's full ones, those of its window, its recurrent states

The next call writes them to pages and slots of its own, so that these positions are not computed again.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.runtime.host_memory import usable_host_bytes

_PIECE_BYTES = 1 << 21


class HostPieces:
    """Reusable pieces of host memory, pinned for a GPU. The memory that is free when the first one is
    allocated limits their total.

    Pinning 2.7 GB takes about 2 s (H200), and torch's own cache of pinned memory is emptied whenever a CUDA
    graph is recorded.
    """

    def __init__(self, device: torch.device):
        self.num_made = 0
        self._is_pinned, self._free, self._max_bytes = device.type == "cuda", [], None

    def allocate(self, num_bytes: int) -> list[Tensor] | None:
        """Return pieces for num_bytes bytes; None if the host has too little memory."""
        if self._max_bytes is None:
            self._max_bytes = usable_host_bytes()
        num = -(-num_bytes // _PIECE_BYTES)
        num_new = max(num - len(self._free), 0)
        if (self.num_made + num_new) * _PIECE_BYTES > self._max_bytes:
            return None
        self.num_made += num_new
        options = {"dtype": torch.uint8, "pin_memory": self._is_pinned}
        new = [torch.empty(_PIECE_BYTES, **options) for _ in range(num_new)]
        return new + [self._free.pop() for _ in range(num - num_new)]

    def release(self, pieces: list[Tensor]) -> None:
        """Take pieces back; the current stream finishes its copies from them before it writes to them."""
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
        cls, host: HostPieces, selected: list[tuple[Tensor, Tensor]], places: list[int]
    ) -> "CarriedCache | None":
        """Copy x[:, indices] for each (x, indices); on a GPU the caller synchronizes before it reads them.
        Return None if the host has too little memory."""
        each = [(x.view(torch.uint8), indices) for x, indices in selected]
        shapes = [torch.Size((len(x), len(indices), *x.shape[2:])) for x, indices in each]
        pieces = host.allocate(sum(shape.numel() for shape in shapes))
        if pieces is None:
            return None
        carried = cls(host, pieces, shapes, places)
        for (x, indices), parts in zip(each, carried._parts(), strict=True):
            for part, source in _pairs(parts, x.index_select(1, indices)):
                part.copy_(source, non_blocking=True)
        return carried

    def contents(self, device: torch.device) -> Iterator[Tensor]:
        """Yield the bytes of each tensor, once: the host memory is released afterwards."""
        assert self._pieces or not any(map(torch.Size.numel, self._shapes)), "this cache was restored before"
        for shape, parts in zip(self._shapes, self._parts(), strict=True):
            x = torch.empty(shape, dtype=torch.uint8, device=device)
            for part, target in _pairs(parts, x):
                target.copy_(part, non_blocking=True)
            yield x
        self._release()

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return len(self._pieces) * _PIECE_BYTES

    def _parts(self) -> Iterator[list[Tensor]]:
        """Yield the parts of pieces that hold each tensor."""
        at = 0
        for shape in self._shapes:
            stop, parts = at + shape.numel(), []
            while at < stop:
                piece, start = divmod(at, _PIECE_BYTES)
                end = min(stop - piece * _PIECE_BYTES, _PIECE_BYTES)
                parts.append(self._pieces[piece][start:end])
                at += end - start
            yield parts

    def _release(self) -> None:
        self._host.release(self._pieces)
        self._pieces = []

    def __del__(self):
        self._release()


def _pairs(parts: list[Tensor], whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return (part, the elements of whole that belong there) of each part."""
    return zip(parts, whole.flatten().split([len(part) for part in parts]), strict=True)
