"""Weights of one shape and format as a stack: each tensor of the format with a leading dimension.

    NVFP4   codes [E, N, K / 2]   scales [E, N, K / 16]   global_scale [E, 1]
    MXFP4   codes [E, N, K / 2]   scales [E, N, K / 32]                               E: experts of a layer

`stack[e]` is a view, not a copy.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from qerl.formats.packed import PackedWeight


class WeightStack(Protocol):
    """Weights of one shape and format; stack[e] is one of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> PackedWeight: ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the format's tensors by name, each with a leading dimension."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """[E, N, K]"""
        return len(self), *self[0].shape

    @functools.cached_property
    def alphas(self) -> list[float] | Tensor:
        """The factors that the operands leave out: one for each weight, or fp32 [E, N]."""
        return self.alpha_E.tolist() if self.alpha_E.dim() == 1 else self.alpha_E

    @functools.cached_property
    def alpha_E(self) -> Tensor:
        """The same on the device, fp32 [E] or [E, N]."""
        return torch.stack([self[index].alpha for index in range(len(self))])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


@runtime_checkable
class ChosenStack(Protocol):
    """A stack with a kernel that unpacks some of its weights; alphas of rows are powers of two."""

    def unpack_chosen(self, chosen_G: Tensor, out: Tensor, times_alpha: bool = False) -> None:
        """Write the operands of the chosen weights (int32) to out [G, N, K], bfloat16; times_alpha: with the
        alphas of their rows."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PackedStack(WeightStack):
    """PackedStack.of(128, (NVFP4.encode(weight_NK) for weight_NK in weights))"""

    kind: type[PackedWeight]
    parts: dict[str, Tensor]
    """The format's tensors by the names of its fields, [E, ...]."""

    @classmethod
    def of(cls, num: int, weights: Iterable[PackedWeight]) -> "PackedStack":
        """Stack `num` weights as they come: one of them is in memory beside the stack."""
        kind: type[PackedWeight] | None = None
        parts: dict[str, Tensor] = {}
        count = 0
        for weight in weights:
            if kind is None:
                kind = type(weight)
                parts = {name: t.new_empty(num, *t.shape) for name, t in weight.tensors().items()}
            assert type(weight) is kind and count < num
            for name, tensor in weight.tensors().items():
                parts[name][count] = tensor
            count += 1
        assert kind is not None and count == num, f"{count} weights, {num} expected"
        return cls(kind, parts)

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    def __getitem__(self, index: int) -> PackedWeight:
        one: Any = {name: tensor[index] for name, tensor in self.parts.items()}
        return self.kind(**one)

    def tensors(self) -> dict[str, Tensor]:
        return self.parts
