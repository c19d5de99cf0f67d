"""One layer of a decode step by the kernels: the step of its mixer, then the step of its MLP.

    kernel_forward.py   the whole step; its tables MIXERS and MLPS name the steps by the layer's kind
    attention.py        h += o W^T of attention
    delta.py            the same of Gated DeltaNet
    mlp.py, mixture.py  h += y W^T of the dense MLP, of a mixture of experts
    NormedProducts      the norms and products that a step is made of

A kind of step is a class `Steps(parts)` with what its layers share, such as a workspace; it is called with a
layer and makes that layer's step. `Steps.obstacle` says of which models it cannot be made.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.linears import FusedLinears, LinearGroup, TorchLinears
from qerl.kernels.attention.decode_attention import DecodeAttention
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.experts.grouped_product import GroupedProduct
from qerl.kernels.pointwise.swiglu import Activation
from qerl.kernels.tiles.lora_shrink import LoraShrink
from qerl.models.adapter_bank import AdapterBank
from qerl.models.architecture import Architecture
from qerl.models.decoder import Decoder, Layer
from qerl.models.linear import QuantLinear
from qerl.models.norm import RMSNorm


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StepParts:
    """Everything that the decode steps of all layers share."""

    decoder: Decoder
    cache: KVCache
    shrink: LoraShrink
    """Norms, and u = scaling * x A^T."""
    packed: FusedLinears
    """Products of packed linears."""
    max_rows: int
    max_pages: int
    chunk: int | None
    """As DecodeAttention takes it."""
    attention: Callable[..., DecodeAttention]
    """Makes the kernels of one shape of attention."""
    grouped: Callable[[torch.device], GroupedProduct]
    """Makes the products of experts."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StepRows:
    """The rows of one decode step: the first num_rows of the state."""

    state: DecodeState
    num_rows: int
    is_together: bool
    """Several rows may be of one sequence and attend to each other."""
    bank: AdapterBank | None
    """The adapters by row in the place of the linears' own; None: their own."""

    @property
    def noise_rows_B(self) -> Tensor:
        return self.state.noise_rows_B[: self.num_rows]

    @property
    def numbers_B(self) -> Tensor | None:
        """The rows' numbers in the bank."""
        return None if self.bank is None else self.noise_rows_B


class Published(Protocol):
    def publish(self) -> None:
        """Copy the adapters' present working copies, in place."""
        ...


class LayerStep(Protocol):
    @property
    def groups(self) -> Sequence[Published]:
        """Linears whose adapters are published."""
        ...

    def __call__(self, h_BD: Tensor, rows: StepRows) -> Tensor:
        """Return h, fp32 [B, D], with this step's output added; h may be overwritten."""
        ...


class Steps(Protocol):
    @staticmethod
    def obstacle(a: Architecture, page_tokens: int) -> str | None:
        """Return why the kernels cannot compute such a step; None if they can."""
        ...

    def __call__(self, layer_index: int, layer: Layer) -> LayerStep: ...


Norm = NoisedRMSNorm | RMSNorm


def norm_of(layer: Layer, name: str | None) -> Norm | None:
    """Return the layer's norm of this name, as NormNames has it; None: there is no norm in this place."""
    if name is None:
        return None
    norm = getattr(layer, name)
    assert isinstance(norm, Norm)
    return norm


class NormedProducts:
    """Linears of one step, grouped as they are launched, with norms and residual."""

    def __init__(
        self, parts: StepParts, linear_groups: Sequence[Sequence[QuantLinear]], after: Norm | None = None
    ):
        """after: of the step's output, before it is added to the residual stream."""
        self._after, self._residual_scale = after, parts.decoder.architecture.residual_scale
        self.groups = tuple(map(LinearGroup, linear_groups))
        self.shrink = parts.shrink
        is_packed = all(group.tiles is not None for group in self.groups)
        self.products: FusedLinears = parts.packed if is_packed else TorchLinears(self.groups[-1].room)

    def normed(
        self, h_BD: Tensor, norm: Norm | None, group: LinearGroup, rows: StepRows
    ) -> tuple[Tensor, Tensor | None]:
        """Return x = norm(h), which the group reads, and u; None if the product makes u or has none. Without
        a norm x is h, rounded."""
        if norm is None:
            return self._shrunk(h_BD.to(group.linears[0].compute), group, rows)
        noise, rows_B = norm.noise_of(rows.noise_rows_B) if isinstance(norm, NoisedRMSNorm) else (None, None)
        operands = h_BD, norm.weight, noise, norm.eps
        if (numbers_B := rows.numbers_B) is not None and rows.bank is not None:
            banked = group.banked(rows.bank)
            slots = banked.slots(numbers_B)
            return self.shrink.norm_shrink(*operands, banked.a_SRK, 0.0, rows_M=rows_B, slots=slots)
        if group.a is None or self.products.computes_lora_hidden(len(h_BD), group):
            return self.shrink.norm(*operands, rows_M=rows_B), None
        out = group.empty_input(len(h_BD), group.a) if group.room else None
        return self.shrink.norm_shrink(*operands, group.a, group.scaling, rows_M=rows_B, out=out)

    def linear(
        self,
        x_BK: Tensor,
        group: LinearGroup,
        u_BR: Tensor | None,
        rows: StepRows,
        residual_BN: Tensor | None = None,
    ) -> Tensor:
        return self.products.linear(x_BK, group, u_BR, residual_BN, rows.numbers_B)

    def swiglu(
        self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None, rows: StepRows, activation: Activation
    ) -> Tensor:
        return self.products.swiglu(x_BK, group, u_BR, activation, rows.numbers_B)

    def added(self, h_BD: Tensor, x_BK: Tensor, group: LinearGroup, rows: StepRows) -> Tensor:
        """Return h + the group's product of x, normed and scaled as the family does; h may be overwritten."""
        x_BK, u_BR = self._shrunk(x_BK, group, rows)
        if self._after is None and self._residual_scale == 1:
            return self.linear(x_BK, group, u_BR, rows, h_BD)
        return self.add_normed(h_BD, self.linear(x_BK, group, u_BR, rows), rows)

    def add_normed(self, h_BD: Tensor, y_BD: Tensor, rows: StepRows) -> Tensor:
        """Return h + y, normed and scaled as the family does; h is overwritten."""
        if self._after is not None:
            y_BD = self._after.normed(y_BD, rows.noise_rows_B)
        return h_BD.add_(y_BD, alpha=self._residual_scale)

    def _shrunk(self, x_BK: Tensor, group: LinearGroup, rows: StepRows) -> tuple[Tensor, Tensor | None]:
        """Return (x, u); x is copied if u must lie behind its rows and they have no free columns."""
        if (numbers_B := rows.numbers_B) is not None and rows.bank is not None:
            banked = group.banked(rows.bank)
            return x_BK, self.shrink.shrink(x_BK, banked.a_SRK, 0.0, slots=banked.slots(numbers_B))
        if group.a is None or self.products.computes_lora_hidden(len(x_BK), group):
            return x_BK, None
        if group.room == 0:
            return x_BK, self.shrink.shrink(x_BK, group.a, group.scaling)
        if x_BK.stride(0) >= group.in_width + group.room:
            return x_BK, self.shrink.shrink(x_BK, group.a, group.scaling, out=group.behind(x_BK))
        copy_BK, u_BR = group.empty_input(len(x_BK), x_BK)
        self.shrink.shrink(x_BK, group.a, group.scaling, out=u_BR, copy=copy_BK)
        return copy_BK, u_BR
