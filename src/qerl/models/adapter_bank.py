"""Several adapters over one frozen model, each for the rows of a pass that carry its number.

Passes of PyTorch's operations read it (engine/decode/forward.py); kernels of decode steps do not.
"""

import collections
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qerl.models.linear_pass import RowAdapters


class AdapterBank:
    def __init__(self, dtype: torch.dtype, device: torch.device):
        """dtype: in which the adapters are multiplied."""
        self._dtype, self._device, self._num_added = dtype, device, 0
        self._parts: dict[nn.Module, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = collections.defaultdict(
            list
        )
        self._tables: dict[nn.Module, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def add(self, adapters: Mapping[nn.Module, tuple[Tensor, Tensor]], scaling: float) -> int:
        """Return the number that rows of this adapter carry; 0 is that of rows without one. adapters: (A [R,
        K], B [N, R]) by linear."""
        self._num_added += 1
        for linear, (a_RK, b_NR) in adapters.items():
            owner_R = torch.full((len(a_RK),), self._num_added, dtype=torch.int32, device=self._device)
            scaling_R = torch.full((len(a_RK),), scaling, dtype=self._dtype, device=self._device)
            a_RK, b_NR = (t.to(self._device, self._dtype) for t in (a_RK, b_NR))
            self._parts[linear].append((a_RK, b_NR.T, owner_R, scaling_R))
            self._tables.pop(linear, None)
        return self._num_added

    def at(self, rows_T: Tensor) -> RowAdapters:
        """Return the adapters of rows with these numbers."""
        for linear in self._parts.keys() - self._tables.keys():
            a_SK, b_SN, owner_S, scaling_S = map(torch.cat, zip(*self._parts[linear], strict=True))
            self._tables[linear] = a_SK, b_SN.T, owner_S, scaling_S
        return RowAdapters(self._tables, rows_T)
