"""Layer inputs in pinned host memory: learn.gradient_checkpointing offload.

h_TD is copied out while the next layers run, and copied back while the layer above is differentiated; at most
two of them are on the device meanwhile. Inputs for which the host has no room stay on the device: those of
the last layers, which are needed first.

torch pins memory in powers of two bytes, so a tensor is kept in pieces of 256 MiB: 3.93 GB, the input of a
layer of 4,096 columns for 240,000 rows, would take 4.29 GB otherwise. The last piece counts as what it takes.
"""

import dataclasses
import math

import torch
from torch import Tensor

_LEAVING = 2
_PIECE_BYTES = 1 << 28


class _HostTensor:
    """A tensor's elements in pieces of host memory."""

    def __init__(self, like: Tensor, *, is_pinned: bool):
        self.shape, self.dtype = like.shape, like.dtype
        step, count = _PIECE_BYTES // like.element_size(), like.numel()
        sizes = [min(step, count - start) for start in range(0, count, step)]
        self._pieces = [torch.empty(size, dtype=like.dtype, pin_memory=is_pinned) for size in sizes]

    def pairs(self, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (a part of whole, its piece)."""
        parts = whole.view(-1).split([len(piece) for piece in self._pieces])
        return list(zip(parts, self._pieces, strict=True))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Copy:
    """A copy in progress. Its tensor on the device must not be reused before it is done."""

    h_TD: Tensor
    is_done: torch.cuda.Event | None

    def wait(self) -> None:
        """Order all later work of the device after the copy."""
        if self.is_done is not None:
            torch.cuda.current_stream().wait_event(self.is_done)


class OnHost:
    """Layer inputs of one pass, put in the layers' order and taken in reverse order. Memory in use is tracked
    by references: streams wait before one is dropped."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None, max_bytes: float = math.inf):
        """max_bytes: of host memory."""
        self._device, self._stream, self._left_bytes = device, stream, max_bytes
        self._staying: dict[int, Tensor] = {}
        self._leaving: dict[int, _Copy] = {}
        self._hosted: dict[int, _HostTensor] = {}
        self._coming: dict[int, _Copy] = {}

    def put(self, layer_index: int, h_TD: Tensor) -> None:
        num_bytes = _pinned_bytes(h_TD.nbytes)
        if num_bytes > self._left_bytes:
            self._left_bytes = 0  # all that follow stay too
            self._staying[layer_index] = h_TD
            return
        self._left_bytes -= num_bytes
        h_TD = h_TD.contiguous()
        if len(self._leaving) == _LEAVING:
            self._leaving.pop(min(self._leaving)).wait()
        self._hosted[layer_index] = hosted = _HostTensor(h_TD, is_pinned=self._stream is not None)
        pairs = [(piece, part) for part, piece in hosted.pairs(h_TD)]
        self._leaving[layer_index] = self._copy(h_TD, pairs)

    def take(self, layer_index: int) -> Tensor:
        """An input that has not left yet is taken from where it is; the copy of the one below starts."""
        if layer_index in self._staying:
            h_TD = self._staying.pop(layer_index)
        else:
            self._fetch(layer_index)
            copy = (self._leaving if layer_index in self._leaving else self._coming).pop(layer_index)
            copy.wait()
            h_TD = copy.h_TD
            del self._hosted[layer_index]
        self._fetch(layer_index - 1)
        return h_TD

    def _fetch(self, layer_index: int) -> None:
        if layer_index not in self._hosted or layer_index in self._leaving or layer_index in self._coming:
            return
        hosted = self._hosted[layer_index]
        h_TD = torch.empty(hosted.shape, dtype=hosted.dtype, device=self._device)
        self._coming[layer_index] = self._copy(h_TD, hosted.pairs(h_TD))

    def _copy(self, h_TD: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> _Copy:
        """Copy the second of each pair into the first."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return _Copy(h_TD, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            is_done = torch.cuda.Event()
            is_done.record()
        return _Copy(h_TD, is_done)


def _pinned_bytes(num_bytes: int) -> int:
    """Return the host memory that pieces for this many bytes take."""
    whole, rest = divmod(num_bytes, _PIECE_BYTES)
    return whole * _PIECE_BYTES + (1 << (rest - 1).bit_length() if rest else 0)
