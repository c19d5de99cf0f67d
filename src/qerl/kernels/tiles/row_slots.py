"""Adapters by row: a launch reads a [S, R, K] and b [S, N, R] of S slots, and each row has one of them.

    u_m = scalings_S[s] * x_m A_s^T,   y_m = x_m W^T + u_m B_s^T,   s = slots_M[m]

Slot 0 has no adapter: its a is zeros, its b is not read. A row has the bits of a launch with its adapter
alone (tests/kernels/tiles/test_row_slots.py): for other slots the kernels add products with zeros, so
all of b must be finite. What the rows are is read on the device, so one recorded graph serves any mix.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_SLOTS = 32
"""The kernels have a bit for each."""


def kernel_rank(max_rank: int) -> int:
    """Return the rank of operands for adapters of up to this one: kernels take a multiple of 16."""
    return -(-max_rank // 16) * 16


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowSlots:
    """slots_M int32 [0, 2, 1, 0], scalings_S fp32 [0, 1, 2]: rows 0 and 3 have no adapter."""

    slots_M: Tensor
    scalings_S: Tensor

    def check(self, num_rows: int, num_slots: int) -> None:
        assert 1 <= num_slots <= MAX_SLOTS
        for tensor, shape, dtype in (
            (self.slots_M, (num_rows,), torch.int32),
            (self.scalings_S, (num_slots,), torch.float32),
        ):
            assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()


def hidden(x_MK: Tensor, a_SRK: Tensor, rows: RowSlots) -> Tensor:
    """Return u, [M, R] in float64 without rounding."""
    scalings_M, slots_M = rows.scalings_S.double()[rows.slots_M.long()], rows.slots_M.long()
    return scalings_M[:, None] * torch.einsum("mk,mrk->mr", x_MK.double(), a_SRK.double()[slots_M])


def expand(u_MR: Tensor, b_SNR: Tensor, rows: RowSlots, starts: Sequence[int] = ()) -> Tensor:
    """Return what u adds to y, [M, N] in float64. starts: as PackedAdapter has them."""
    slots_M, ends, rank = rows.slots_M.long(), (*starts, b_SNR.shape[1]), b_SNR.shape[2]
    parts = []
    for group, (first, end) in enumerate(zip((0, *starts), ends, strict=True)):
        u_MR1 = u_MR[:, group * rank : (group + 1) * rank].double()
        parts.append(torch.einsum("mr,mnr->mn", u_MR1, b_SNR[:, first:end].double()[slots_M]))
    return torch.cat(parts, dim=1) * (slots_M > 0)[:, None]
