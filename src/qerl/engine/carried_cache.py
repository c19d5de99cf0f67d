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
    """A span's contents: of each tensor of the cache [L, n, ...] for n pages or slots."""

    pages: list[Tensor]
    windowed: list[Tensor]
    places: list[int]
    """Those of the windowed pages."""
    states: list[Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.pages, *self.windowed, *self.states))


def copied_out(tensors: list[Tensor], indices: list[int]) -> list[Tensor]:
    """Copy x[:, indices] of each tensor x; a GPU's copies are complete when it has been waited for."""
    copies = []
    for tensor in map(_as_integers, tensors):
        found = tensor.index_select(1, sent(torch.tensor(indices, dtype=torch.long), tensor.device))
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
        copies.append(copy.copy_(found, non_blocking=True))
    return copies


def copy_in(copies: list[Tensor], tensors: list[Tensor], indices: list[int]) -> None:
    """Write the copies to x[:, indices] of the tensors."""
    for copy, tensor in zip(copies, map(_as_integers, tensors), strict=True):
        places = sent(torch.tensor(indices, dtype=torch.long), tensor.device)
        tensor.index_copy_(1, places, copy.to(tensor.device, non_blocking=True))


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
