"""Several adapters over one frozen model, each for the rows of a pass that carry its number.

Passes of PyTorch's operations read it by `at`; decode steps by kernels copy what changed into tensors of
their own (engine/decode/group_bank.py).
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qerl.errors import require
from qerl.kernels.tiles.row_slots import MAX_SLOTS
from qerl.models.linear_pass import RowAdapters

Adapters = Mapping[nn.Module, tuple[Tensor, Tensor]]
Part = tuple[Tensor, Tensor, Tensor, Tensor]
"""An adapter of one linear, or several: A [S, K], B^T [S, N], owner_S, scaling_S, as RowAdapters has them."""


class AdapterBank:
    """May be changed by other threads than the one that runs passes, which alone uses the device: work of
    another would break the recording of a CUDA graph."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, max_adapters: int = MAX_SLOTS - 1, max_rank: int = 128
    ):
        """dtype: in which the adapters are multiplied; max_rank: for which kernels have room."""
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self.scalings_S = torch.zeros(1 + max_adapters, device=device)
        """Scaling by number; rows without an adapter have number 0."""
        self._dtype, self._device, self._num_added = dtype, device, 0
        self._added: dict[int, tuple[Adapters, float]] = {}  # in host memory, until a pass takes them
        self._parts: dict[nn.Module, dict[int, Part]] = {}
        self._tables: dict[nn.Module, Part] = {}
        self._versions: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Number of adapters that can be added."""
        return self.max_adapters - len(self._versions)

    def add(self, adapters: Adapters, scaling: float) -> int:
        """Return the number that rows of this adapter carry, the least that is free; 0 is that of rows
        without one. adapters: (A [R, K], B [N, R]) by linear. Raise UserError if there is no place, or for
        numbers that are not finite: they would reach other adapters' rows."""
        ranks = [len(a_RK) for a_RK, _ in adapters.values()]
        require(max(ranks, default=0) <= self.max_rank, f"the adapter's rank is above {self.max_rank}")
        made = {x: (a_RK.cpu().to(self._dtype), b.cpu().to(self._dtype)) for x, (a_RK, b) in adapters.items()}
        is_finite = all(t.isfinite().all() for pair in made.values() for t in pair)
        require(is_finite, "the adapter has numbers not finite")
        with self._lock:
            numbers = range(1, 1 + self.max_adapters)
            number = next((n for n in numbers if n not in self._versions), 0)
            require(number > 0, f"{self.max_adapters} adapters are in use, the limit")
            self._num_added += 1
            self._versions[number] = self._num_added
            self._added[number] = made, scaling
            return number

    @torch.no_grad()
    def take(self) -> dict[int, int]:
        """In the thread that runs passes: move what was added to the device. Return the version of each
        number; no two adapters have had the same."""
        with self._lock:
            for number, (adapters, scaling) in self._added.items():
                self.scalings_S[number] = scaling
                for linear, pair in adapters.items():
                    a_RK, b_NR = (t.to(self._device) for t in pair)
                    owner_R = torch.full((len(a_RK),), number, dtype=torch.int32, device=self._device)
                    scaling_R = torch.full((len(a_RK),), scaling, device=self._device)
                    self._parts.setdefault(linear, {})[number] = a_RK, b_NR.T, owner_R, scaling_R
                    self._tables.pop(linear, None)
            self._added.clear()
            return dict(self._versions)

    def remove(self, number: int) -> None:
        """Forget an adapter of which no row carries the number any more."""
        with self._lock:
            del self._versions[number]
            self._added.pop(number, None)
            for linear, parts in self._parts.items():
                if parts.pop(number, None) is not None:
                    self._tables.pop(linear, None)

    def clear(self) -> None:
        """Forget all adapters; no row may carry a number."""
        for number in list(self._versions):
            self.remove(number)

    def part(self, linear: nn.Module, number: int) -> tuple[Tensor, Tensor] | None:
        """Return (A [R, K], B [N, R]) of an adapter; None if it has none for the linear."""
        with self._lock:
            part = self._parts.get(linear, {}).get(number)
        return None if part is None else (part[0], part[1].T)

    def at(self, rows_T: Tensor) -> RowAdapters:
        """Return the adapters of rows with these numbers."""
        self.take()
        with self._lock:
            for linear, parts in self._parts.items():
                if parts and linear not in self._tables:
                    a_SK, b_SN, owner_S, scaling_S = map(
                        torch.cat, zip(*(parts[n] for n in sorted(parts)), strict=True)
                    )
                    self._tables[linear] = a_SK, b_SN.T, owner_S, scaling_S
            return RowAdapters(dict(self._tables), rows_T)
