"""Options of one forward and backward pass that linears read: cached operands, dropout, precision, adapters
that differ by row.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn


class OperandCache:
    """Unpacked operands. is_held: kept until `clear`; else until they are read once more."""

    def __init__(self, *, is_held: bool):
        self.is_held = is_held
        self._operands: dict[int, Tensor] = {}

    def of(self, owner: object, unpack: Callable[[], Tensor]) -> Tensor:
        operand = self._operands.get(id(owner))
        if operand is None:
            self._operands[id(owner)] = operand = unpack()
        elif not self.is_held:
            del self._operands[id(owner)]
        return operand

    def clear(self) -> None:
        self._operands.clear()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowAdapters:
    """y_t = W x_t + B (mask_t * A x_t): A [S, K] and B [N, S] have all adapters side by side; a row's mask is
    the scaling of its own, and 0. Held to one adapter at a time: tests/models/test_adapter_bank.py."""

    tables: Mapping[nn.Module, tuple[Tensor, Tensor, Tensor, Tensor]]
    """(A, B, owner_S, scaling_S) by linear; owner_S: the row number of the adapter that each of the S is
    of."""
    rows_T: Tensor
    """Row numbers; one that owns nothing has no adapter."""

    @torch.no_grad()
    def add(self, y_TN: Tensor, x_TK: Tensor, linear: nn.Module) -> Tensor:
        """Return y plus the adapters' products; without a gradient."""
        if linear not in self.tables:
            return y_TN
        a_SK, b_NS, owner_S, scaling_S = self.tables[linear]
        mask_TS = (self.rows_T[:, None] == owner_S) * scaling_S
        return torch.addmm(y_TN, (x_TK @ a_SK.T * mask_TS).to(y_TN.dtype), b_NS.T)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LinearPass:
    """PLAIN = LinearPass(): each product unpacks its weight, and nothing is dropped."""

    operands: OperandCache | None = None
    """Unpacked operands, for more than one product; None: each product unpacks its own."""
    dropout: Mapping[nn.Module, tuple[float, int]] = dataclasses.field(default_factory=dict)
    """(rate, seed) of the dropout on the input of a linear's adapter."""
    backward: Literal["bf16", "int8"] = "bf16"
    """Precision of the products of the backward pass, where linears have kernels for it (learn.backward)."""
    is_repeated: bool = False
    """True if a layer runs again for its gradients alone."""
    needs_output: bool = True
    """False if only gradients are needed, not the result."""
    row_adapters: RowAdapters | None = None
    """Adapters in the place of the linears' own; None: their own."""

    @property
    def without_output(self) -> "LinearPass":
        """The pass of the last product of a layer: if the layer is repeated, nothing reads its result."""
        return dataclasses.replace(self, needs_output=False) if self.is_repeated else self

    @contextlib.contextmanager
    def holding(self) -> Iterator["LinearPass"]:
        """Yield this pass with operands that are unpacked only once inside; the first product of each must
        have its adapter on."""
        if self.operands is not None and self.operands.is_held:
            yield self
            return
        operands = OperandCache(is_held=True)
        try:
            yield dataclasses.replace(self, operands=operands)
        finally:
            operands.clear()

    @contextlib.contextmanager
    def repeating(self) -> Iterator["LinearPass"]:
        """Yield this pass for a forward pass that is repeated and the backward pass that follows: each
        operand that is not held anyway is kept for one more product."""
        operands = OperandCache(is_held=False)
        try:
            yield dataclasses.replace(self, operands=self.operands or operands, is_repeated=True)
        finally:
            operands.clear()


PLAIN = LinearPass()
