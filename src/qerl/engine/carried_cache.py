"""Copies in host memory of what the cache holds of unfinished samples, for the call that continues them.

    of a prompt    its pages, those of its window, its recurrent states; once for its samples
    of a sample    its pages after the prompt's full ones, those of its window, its recurrent states

Put back into pages and slots of the next call, they are not computed again. They are those of the weights
that computed them.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.gpu_memory import sent

# All alike: torch pins memory in powers of two bytes, slowly, and uses it again for the same size.
_PIECE_BYTES = 1 << 21


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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class CarriedCache:
    """A span's contents: x[:, indices] of tensors [L, n, ...] of pages or slots, one after another."""

    places: list[int]
    """Those of the windowed pages."""
    _pieces: list[Tensor]
    _shapes: list[torch.Size]

    @classmethod
    def of(cls, selected: list[tuple[Tensor, list[int]]], places: list[int]) -> "CarriedCache":
        """Copy these tensors' pages or slots; a GPU's copies are complete when it has been waited for."""
        found = [_bytes_of(x).index_select(1, _indices(indices, x.device)) for x, indices in selected]
        pieces = []
        for part in torch.cat([x.flatten() for x in found]).split(_PIECE_BYTES):
            piece = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=part.is_cuda)
            pieces.append(piece[: len(part)].copy_(part, non_blocking=True))
        return cls(places, pieces, [x.shape for x in found])

    def on(self, device: torch.device) -> list[Tensor]:
        """Return the bytes that were selected of each tensor."""
        flat = torch.cat([piece.to(device, non_blocking=True) for piece in self._pieces])
        sizes = [shape.numel() for shape in self._shapes]
        return [x.view(shape) for x, shape in zip(flat.split(sizes), self._shapes, strict=True)]

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return len(self._pieces) * _PIECE_BYTES


def write(x: Tensor, indices: list[int], copy: Tensor) -> None:
    """Write bytes to x[:, indices]."""
    _bytes_of(x).index_copy_(1, _indices(indices, x.device), copy)


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _indices(indices: list[int], device: torch.device) -> Tensor:
    return sent(torch.tensor(indices, dtype=torch.long), device)
