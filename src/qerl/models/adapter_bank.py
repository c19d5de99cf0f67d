"""Several adapters over one frozen model, each for the rows of a pass that carry its number.

Passes of PyTorch's operations read it (engine/decode/forward.py); kernels of decode steps do not.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qerl.models.linear_pass import RowAdapters

Part = tuple[Tensor, Tensor, Tensor, Tensor]
"""An adapter of one linear, or several: A [S, K], B^T [S, N], owner_S, scaling_S, as RowAdapters has them."""


class AdapterBank:
    """May be changed by other threads than those that run passes."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        """dtype: in which the adapters are multiplied."""
        self._dtype, self._device, self._num_added = dtype, device, 0
        self._parts: dict[nn.Module, dict[int, Part]] = {}
        self._tables: dict[nn.Module, Part] = {}
        self._lock = threading.Lock()

    def add(self, adapters: Mapping[nn.Module, tuple[Tensor, Tensor]], scaling: float) -> int:
        """Return the number that rows of this adapter carry; 0 is that of rows without one. adapters: (A [R,
        K], B [N, R]) by linear."""
        with self._lock:
            self._num_added += 1
            for linear, (a_RK, b_NR) in adapters.items():
                owner_R = torch.full((len(a_RK),), self._num_added, dtype=torch.int32, device=self._device)
                scaling_R = torch.full((len(a_RK),), scaling, dtype=self._dtype, device=self._device)
                a_RK, b_NR = (t.to(self._device, self._dtype) for t in (a_RK, b_NR))
                self._parts.setdefault(linear, {})[self._num_added] = a_RK, b_NR.T, owner_R, scaling_R
                self._tables.pop(linear, None)
            return self._num_added

    def remove(self, number: int) -> None:
        """Forget an adapter of which no row carries the number any more."""
        with self._lock:
            for linear, parts in self._parts.items():
                if parts.pop(number, None) is not None:
                    self._tables.pop(linear, None)

    def at(self, rows_T: Tensor) -> RowAdapters:
        """Return the adapters of rows with these numbers."""
        with self._lock:
            for linear, parts in self._parts.items():
                if parts and linear not in self._tables:
                    a_SK, b_SN, owner_S, scaling_S = map(torch.cat, zip(*parts.values(), strict=True))
                    self._tables[linear] = a_SK, b_SN.T, owner_S, scaling_S
            return RowAdapters(dict(self._tables), rows_T)
