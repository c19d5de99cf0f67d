"""The products of a decode step: linears that read the same x, in one call, with their adapters.

linear   y = x W^T + u B^T + bias + residual         q|k|v, o, down; u = scaling * x @ A^T
swiglu   y = silu(gate) * up                         gate|up

A residual is in fp32, and so is what is added to it; any other y is in x's dtype.

PackedProducts   kernels/nvfp4_decode.py over the model's tiles, u made in the same launch where that pays
PlainProducts    torch, linear by linear, over whatever format the linears are in; u comes ready
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.kernels.fp8_linear import fp8_product
from qerl.kernels.matmul_fp32 import add_product
from qerl.kernels.nvfp4_decode import NVFP4Decode, PackedAdapter, pays_to_make_u, swiglu_order
from qerl.kernels.nvfp4_unpack import UnpackRows
from qerl.kernels.swiglu import swiglu
from qerl.models.fused_weights import fuse_fp8_weights, fuse_weights
from qerl.models.linear import QuantLinear
from qerl.models.packed_linear import tiles_of


class LinearGroup:
    """Linears of one layer that read the same x, with their adapters stacked: a [G R, K] and b [N, R] in the
    order of the packed rows, or, where the linears are not packed, b [N, G R] with zeros between them."""

    def __init__(self, linears: Sequence[QuantLinear]):
        self.linears, self.tiles = tuple(linears), tiles_of(linears)
        self.rank = max(linear.rank for linear in linears)
        self.scaling = max(linear.scaling for linear in linears)
        self.ends = torch.tensor([linear.out_width for linear in linears]).cumsum(0).tolist()
        self.num_weights = sum(linear.out_width * linear.in_width for linear in linears)
        self.bias_N = _joined_bias(linears)
        self.joined_NK = fuse_weights(linears) if self.tiles is None else None
        self.fp8 = fuse_fp8_weights(linears)
        self._device = next(t for linear in linears for t in linear.tensors).device
        self.a, self.b = self._stacked() if self.rank else (None, None)

    def publish(self) -> None:
        """In place: recorded graphs point to the stacked copies."""
        if self.a is not None and self.b is not None:
            a, b = self._stacked()
            self.a.copy_(a)
            self.b.copy_(b)

    def adapter(self, u_BR: Tensor | None) -> PackedAdapter | None:
        if self.a is None or self.b is None:
            return None
        starts = () if self._is_interleaved else tuple(self.ends[:-1])
        return PackedAdapter(self.a, self.b, self.scaling, starts, u_BR)

    @property
    def _is_interleaved(self) -> bool:
        return self.tiles is not None and self.tiles.rows is UnpackRows.GATE_UP

    def _stacked(self) -> tuple[Tensor, Tensor]:
        a_parts, b_parts = zip(*(self._working(linear) for linear in self.linears), strict=True)
        if self.tiles is None:
            return torch.cat(a_parts), torch.block_diag(*b_parts)
        b_NR = torch.cat(b_parts)
        if self._is_interleaved:
            b_NR = b_NR[swiglu_order(len(b_parts[0]), b_NR.device)]
        return torch.cat(a_parts), b_NR

    def _working(self, linear: QuantLinear) -> tuple[Tensor, Tensor]:
        """Zeros for a linear that has no adapter."""
        if linear.a_work is not None and linear.b_work is not None:
            return linear.a_work, linear.b_work
        zeros = torch.zeros(self.rank, linear.in_width, dtype=linear.compute, device=self._device)
        return zeros, zeros.new_zeros(linear.out_width, self.rank)


def _joined_bias(linears: Sequence[QuantLinear]) -> Tensor | None:
    """fp32 [N]; a group has biases or it has none."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    return torch.cat(biases).float() if biases else None


class FusedLinears(Protocol):
    def makes_u(self, rows: int, group: LinearGroup) -> bool:
        """Whether u of so many rows is made here; else it is given, where the group has an adapter."""
        ...

    def linear(
        self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None, residual_BN: Tensor | None
    ) -> Tensor:
        """y_BN; it may take the residual's place."""
        ...

    def swiglu(self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None) -> Tensor: ...


class PackedLinears:
    def __init__(self, device: torch.device, cache_folder: Path):
        self._kernel = NVFP4Decode(device, cache_folder)

    def makes_u(self, rows: int, group: LinearGroup) -> bool:
        return pays_to_make_u(rows, group.num_weights)

    def linear(
        self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None, residual_BN: Tensor | None
    ) -> Tensor:
        assert group.tiles is not None
        return self._kernel.linear(
            x_BK,
            group.tiles.tiles,
            group.tiles.factors_N,
            adapter=group.adapter(u_BR),
            bias_N=group.bias_N,
            residual_MN=residual_BN,
        )

    def swiglu(self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None) -> Tensor:
        assert group.tiles is not None and group.bias_N is None
        adapter = group.adapter(u_BR)
        return self._kernel.swiglu(x_BK, group.tiles.tiles, group.tiles.factors_N, adapter=adapter)


class TorchLinears:
    def makes_u(self, rows: int, group: LinearGroup) -> bool:
        return False

    def linear(
        self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None, residual_BN: Tensor | None
    ) -> Tensor:
        if residual_BN is not None:
            return self._onto(residual_BN, x_BK, group, u_BR)
        y_BN = self._product(x_BK, group)
        return y_BN if u_BR is None or group.b is None else torch.addmm(y_BN, u_BR, group.b.T)

    def swiglu(self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None) -> Tensor:
        gate_BF, up_BF = self.linear(x_BK, group, u_BR, None).chunk(2, dim=-1)
        return swiglu(gate_BF, up_BF)

    def _onto(self, sum_BN: Tensor, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None) -> Tensor:
        if group.joined_NK is None:
            sum_BN.add_(self._product(x_BK, group))
        else:
            add_product(sum_BN, x_BK, group.joined_NK.T)
            if group.bias_N is not None:
                sum_BN.add_(group.bias_N)
        return sum_BN if u_BR is None or group.b is None else add_product(sum_BN, u_BR, group.b.T)

    def _product(self, x_BK: Tensor, group: LinearGroup) -> Tensor:
        if group.joined_NK is not None:
            bias = None if group.bias_N is None else group.bias_N.to(x_BK.dtype)
            return F.linear(x_BK, group.joined_NK, bias)
        if group.fp8 is not None:
            y_BN = fp8_product(x_BK, group.fp8)
            return y_BN if group.bias_N is None else y_BN.add_(group.bias_N)
        return torch.cat([each.frozen(x_BK) for each in group.linears], dim=-1)
