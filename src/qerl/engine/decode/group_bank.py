"""The adapters of a bank as the kernels of a decode step read them, for one group of linears (row_slots.py).

    a_SRK   [slots, G R, K]: of each slot A of the group's G linears, one after the other
    b_SNR   [slots, N, R], in the order of the packed rows

R is the bank's largest rank, rounded up to what kernels take; what an adapter of a lower one leaves is zero.
Graphs point to the tensors, so `update` copies new adapters in place.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.tiles.packed_product import PackedAdapter
from qerl.kernels.tiles.row_slots import RowSlots, kernel_rank
from qerl.models.adapter_bank import AdapterBank
from qerl.models.linear import QuantLinear


class GroupBank:
    def __init__(
        self,
        linears: Sequence[QuantLinear],
        bank: AdapterBank,
        starts: tuple[int, ...],
        order_N: Tensor | None,
    ):
        """starts: as PackedAdapter has them; order_N: of the packed rows, None if they are in order."""
        self.bank, self._linears, self._starts, self._order_N = bank, linears, starts, order_N
        self._rank, self._versions = kernel_rank(bank.max_rank), dict[int, int]()
        slots, width = 1 + bank.max_adapters, linears[0].in_width
        how = {"dtype": linears[0].compute, "device": bank.scalings_S.device}
        self.a_SRK = torch.zeros(slots, len(linears) * self._rank, width, **how)
        self.b_SNR = torch.zeros(slots, sum(each.out_width for each in linears), self._rank, **how)

    @torch.no_grad()
    def update(self, versions: dict[int, int]) -> None:
        """Copy the adapters that are new. versions: what the bank's `take` has returned."""
        for number, version in versions.items():
            if self._versions.get(number) != version:
                a_parts, b_parts = zip(*(self._padded(each, number) for each in self._linears), strict=True)
                b_NR = torch.cat(b_parts)
                self.a_SRK[number] = torch.cat(a_parts)
                self.b_SNR[number] = b_NR if self._order_N is None else b_NR[self._order_N]
        self._versions = versions

    def slots(self, numbers_M: Tensor) -> RowSlots:
        return RowSlots(numbers_M, self.bank.scalings_S)

    def adapter(self, numbers_M: Tensor, u_MR: Tensor, follows_shrink: bool) -> PackedAdapter:
        """Return the adapters of rows with these numbers, whose u has been made."""
        slots = self.slots(numbers_M)
        return PackedAdapter(self.a_SRK, self.b_SNR, 0.0, self._starts, u_MR, follows_shrink, slots)

    def _padded(self, linear: QuantLinear, number: int) -> tuple[Tensor, Tensor]:
        part = self.bank.part(linear, number)
        if part is None:
            zeros_RK = self.a_SRK.new_zeros(self._rank, linear.in_width)
            return zeros_RK, zeros_RK.new_zeros(linear.out_width, self._rank)
        return with_rank(*part, self._rank)


def with_rank(a_RK: Tensor, b_NR: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return both with zeros up to this rank; they may be stacks of matrices."""
    if not (missing := rank - a_RK.shape[-2]):
        return a_RK, b_NR
    return F.pad(a_RK, (0, 0, 0, missing)), F.pad(b_NR, (0, missing))
