"""The state that a decode step reads and advances: one row per running sample, on the device, allocated once.

    tokens_B     the newest token, whose key and value are not cached yet
    positions_B  its position in the sequence; -1: the row is empty, or its sample has ended
    ends_B       a sample ends when a new token would move its row to this position or past it
    keys_B       the sample's random key; a sampled token is a function of (key, position, vocabulary index)
    tables_BX    the sequence's pages in order
    window_tables_BX   likewise, of layers with a window that have their own; those before it are stale
    noise_rows_B the row's entry in the noise table of the norms, if there is one
    states_B     slot of the sequence's recurrent states, if layers have any
    chunk_1      positions of a unit of attention's work, where it is not fixed (decode_shape.py)

    drawn_tokens_WB, drawn_logprobs_WB    results of the last W steps; place_1 is the index of the next

Neighboring rows should be samples of one prompt: they then read the pages that they share at about the same
time. B rows, X pages of the longest sequence, W steps of a burst.
"""

import dataclasses

import torch
from torch import Tensor

from qerl.kernels.attention.decode_shape import LONG_CHUNKS


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class DecodeState:
    tokens_B: Tensor  # int32
    positions_B: Tensor  # int32
    ends_B: Tensor  # int32
    keys_B: Tensor  # int64, not negative
    tables_BX: Tensor  # int32
    window_tables_BX: Tensor  # int32
    noise_rows_B: Tensor  # int32
    states_B: Tensor  # int32
    chunk_1: Tensor  # int32 [1]
    drawn_tokens_WB: Tensor  # int32
    drawn_logprobs_WB: Tensor  # fp32
    place_1: Tensor  # int32 [1]

    def of_width(self, pages: int) -> "DecodeState":
        """Return a view whose tables have only the first `pages` pages."""
        return dataclasses.replace(
            self, tables_BX=self.tables_BX[:, :pages], window_tables_BX=self.window_tables_BX[:, :pages]
        )

    def advance(self, tokens_B: Tensor, logprobs_B: Tensor, stop_tokens: Tensor) -> None:
        """Write the tokens to the ring buffer and move each live row to its next position, or end it."""
        B, tokens_B = len(tokens_B), tokens_B.int()
        positions_B, slot = self.positions_B[:B], self.place_1.long()
        is_live_B = positions_B >= 0
        next_B = positions_B + 1
        is_last_B = (tokens_B[:, None] == stop_tokens).any(1) | (next_B >= self.ends_B[:B])
        is_last_B |= ~logprobs_B.isfinite()
        ring_tokens, ring_logprobs = self.drawn_tokens_WB[:, :B], self.drawn_logprobs_WB[:, :B]
        ring_tokens.index_copy_(0, slot, (tokens_B * is_live_B)[None])
        ring_logprobs.index_copy_(0, slot, logprobs_B.where(is_live_B, 0)[None])
        self.tokens_B[:B].copy_(tokens_B.where(is_live_B, self.tokens_B[:B]))
        positions_B.copy_(next_B.where(is_live_B & ~is_last_B, -1))
        self.place_1.add_(1)

    @classmethod
    def empty(cls, rows: int, pages: int, steps: int, device: torch.device | str) -> "DecodeState":
        """Return a state with no row in use."""

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        return cls(
            tokens_B=ints(rows),
            positions_B=ints(rows, fill=-1),
            ends_B=ints(rows),
            keys_B=torch.zeros(rows, dtype=torch.int64, device=device),
            tables_BX=ints(rows, pages),
            window_tables_BX=ints(rows, pages),
            noise_rows_B=ints(rows),
            states_B=ints(rows),
            chunk_1=ints(1, fill=LONG_CHUNKS[-1]),
            drawn_tokens_WB=ints(steps, rows),
            drawn_logprobs_WB=torch.zeros(steps, rows, device=device),
            place_1=ints(1),
        )
