"""What a decode step reads and moves on: one row for each running sample, on the device, allocated once.

    tokens_B     the newest token, whose key and value are not cached yet
    positions_B  its position in the sequence; -1: the row is empty, or its sample has ended
    ends_B       the position at which a sample has all the tokens it may have: a draw that would move a row
                 to it, or beyond, ends the sample
    keys_B       names the sample's randomness; a draw is a function of (key, position, vocabulary index)
    tables_BX    the sequence's pages in order
    noise_rows_B the norms' noise of the row, where it has a table

    drawn_tokens_WB, drawn_logprobs_WB    what the last W steps drew; place_1 says where the next draw goes

Samples of one prompt are best neighbours: they then read the pages that they share at about the same time.
B rows, X pages of the longest sequence, W steps of a burst.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class DecodeState:
    tokens_B: Tensor  # int32
    positions_B: Tensor  # int32
    ends_B: Tensor  # int32
    keys_B: Tensor  # int64, not negative
    tables_BX: Tensor  # int32
    noise_rows_B: Tensor  # int32
    drawn_tokens_WB: Tensor  # int32
    drawn_logprobs_WB: Tensor  # fp32
    place_1: Tensor  # int32 [1]

    def of_width(self, pages: int) -> "DecodeState":
        """A view of it whose tables are of so many pages."""
        return dataclasses.replace(self, tables_BX=self.tables_BX[:, :pages])

    @classmethod
    def empty(cls, rows: int, pages: int, steps: int, device: torch.device | str) -> "DecodeState":
        """No row in use."""

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        return cls(
            tokens_B=ints(rows),
            positions_B=ints(rows, fill=-1),
            ends_B=ints(rows),
            keys_B=torch.zeros(rows, dtype=torch.int64, device=device),
            tables_BX=ints(rows, pages),
            noise_rows_B=ints(rows),
            drawn_tokens_WB=ints(steps, rows),
            drawn_logprobs_WB=torch.zeros(steps, rows, device=device),
            place_1=ints(1),
        )
