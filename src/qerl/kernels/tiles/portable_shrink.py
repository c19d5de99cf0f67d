"""u = scaling * x A^T made inside the portable product: its memory, and when that pays.

The kernel is kernels/tiles/portable_shrink.cuh. All launches of a device share the memory, which each leaves
as it found it, but for the turn.
"""

import struct

import torch

from qerl.kernels.runtime.nvrtc import addresses
from qerl.kernels.tiles.packed_product import PackedAdapter

MAX_ROWS = 64
"""Tokens of a product up to which making u in it is faster than a launch of its own (dev/log/portable.md)."""
_SLICE_K = 128
_PARTIAL_WORDS = 2**20  # 231 slices of 64 tokens at rank 64 (72B, down)
_U_WORDS = 2**15  # 256 tokens at rank 64 (q|k|v)
MAKES_U = {"GIVEN_U": 0, "U_WORDS": _U_WORDS, "SLICE_K": _SLICE_K}
"""Constants of a product that makes u."""
AFTER_SHRINK = {"LATE_WAIT": 1}
"""Constants of a product whose u the launch before makes, beside it."""


class PortableShrink:
    """Sums that CTAs pass on, and two buffers of u."""

    def __init__(self, device: torch.device):
        self.partials = torch.full((_PARTIAL_WORDS,), -1, dtype=torch.int32, device=device)
        self.u = torch.full((2, _U_WORDS), -1, dtype=torch.int32, device=device)
        self.turns = torch.zeros(2, dtype=torch.int32, device=device)

    def fits(self, tokens: int, K: int, rows: int) -> bool:
        """tokens: of whole tiles; rows: of all adapters that read x."""
        return -(-K // _SLICE_K) * tokens * rows <= _PARTIAL_WORDS and tokens * rows <= 2 * _U_WORDS

    def low_rank(self, adapter: PackedAdapter | None, tokens: int) -> bytes:
        """Return the kernel's `LowRank`."""
        if adapter is None:
            return struct.pack("4Qfi", 0, 0, 0, 0, 0.0, 0)
        rows, K = adapter.a.shape[-2:]
        if adapter.lora_hidden is not None:
            pointers = addresses(adapter.a, None, adapter.lora_hidden, None)
            return struct.pack("4Qfi", *pointers, adapter.scaling, rows)
        assert self.fits(tokens, K, rows)
        pointers = addresses(adapter.a, self.partials, self.u, self.turns)
        return struct.pack("4Qfi", *pointers, adapter.scaling, rows)
