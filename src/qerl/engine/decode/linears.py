"""The products of a decode step: linears of the same input in one call, with their adapters.

linear   y = x W^T + u B^T + bias + residual         q|k|v, o, down; u = scaling * x @ A^T
swiglu   y = silu(gate) * up, or gelu                gate|up

A residual is in fp32, and so is the product added to it; any other y is in x's dtype.

PackedLinears   kernels/tiles/nvfp4_decode.py over the model's tiles, portable, and for NF4, FP8 and INT8
                kernels/tiles/portable_product.py; u is made in the same launch where that pays
TorchLinears    cuBLAS, u comes ready. BF16: one product [x | u] @ [W | B]^T. FP8Flow: one product, and one
                for the adapters. What does not fit tiles: linear by linear, and one product for the adapters
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.engine.decode.group_bank import GroupBank, with_rank
from qerl.kernels.linear.fp8_linear import fp8_product
from qerl.kernels.linear.fused_linear import side_by_side
from qerl.kernels.pointwise.matmul_fp32 import add_product
from qerl.kernels.pointwise.swiglu import Activation, gated
from qerl.kernels.runtime import row_kernel
from qerl.kernels.tiles.nvfp4_decode import (
    NVFP4Decode,
    PackedAdapter,
    pays_to_compute_lora_hidden,
    swiglu_order,
)
from qerl.kernels.tiles.nvfp4_tile import MAX_TOKENS
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.kernels.tiles.row_slots import kernel_rank
from qerl.kernels.tiles.tile_layout import TileLayout
from qerl.kernels.tiles.tile_unpack import UnpackRows
from qerl.models.adapter_bank import AdapterBank
from qerl.models.linear import QuantLinear
from qerl.models.packed.fused_weights import FusedBF16, fuse_fp8_weights, fuse_weights
from qerl.models.packed.packed_linear import tiles_of

ONE_ORDER_ROWS = 32  # up to this many rows sums have one order: tests/kernels/tiles/test_nvfp4_decode.py


class LinearGroup:
    """Linears of one layer that read the same x, with their adapters stacked.

    tiles       a [G R, K], b [N, R] in the order of the packed rows; zeros for a linear without an adapter
    wide_NC     BF16: [W | B], which holds the linears' own weights; a [R, K] of those that have an adapter
    otherwise   a as for BF16, b [N, R] with zeros between the linears

    R is a multiple of 16, as kernels take it; what the adapters leave of it is zero.
    """

    def __init__(self, linears: Sequence[QuantLinear]):
        self.linears, self.tiles = tuple(linears), tiles_of(linears)
        self.rank = kernel_rank(max(linear.rank for linear in linears))
        self.scaling = max(linear.scaling for linear in linears)
        self.in_width = linears[0].in_width
        self.ends = torch.tensor([linear.out_width for linear in linears]).cumsum(0).tolist()
        self.starts = () if self.is_interleaved else tuple(self.ends[:-1])
        self._device = next(t for linear in linears for t in linear.tensors).device
        self._order_N = swiglu_order(self.ends[0], self._device) if self.is_interleaved else None
        self.bias_N = self._stacked_bias()
        self.fp8 = fuse_fp8_weights(linears)
        fused = fuse_weights(linears) if self.tiles is None and self.fp8 is None else None
        self.wide_NC = fused.wide_NC if isinstance(fused, FusedBF16) else None
        self._banked: GroupBank | None = None
        self.a, self.b = self._stacked() if self.rank else (None, None)

    def publish(self) -> None:
        """Copy the adapters in place: recorded graphs point to the stacked copies. `copy_masters` has
        written b of BF16 weights."""
        if self.a is not None:
            a, b = self._stacked()
            self.a.copy_(a)
            if self.b is not None and b is not None:
                self.b.copy_(b)

    def adapter(
        self, u_BR: Tensor | None, follows_shrink: bool = False, numbers_B: Tensor | None = None
    ) -> PackedAdapter | None:
        """Return the group's own adapter, or with numbers_B those of the bank's rows."""
        if numbers_B is not None:
            assert self._banked is not None and u_BR is not None
            return self._banked.adapter(numbers_B, u_BR, follows_shrink)
        if self.a is None or self.b is None:
            return None
        return PackedAdapter(self.a, self.b, self.scaling, self.starts, u_BR, follows_shrink)

    def banked(self, bank: AdapterBank) -> GroupBank:
        """Return the bank's adapters of this group, which the caller updates."""
        if self._banked is None or self._banked.bank is not bank:
            self._banked = GroupBank(self.linears, bank, self.starts, self._order_N)
        return self._banked

    @property
    def room(self) -> int:
        """Columns for u that `linear` wants behind each row of x; 0 where u is a tensor of its own."""
        return 0 if self.wide_NC is None or self.a is None else len(self.a)

    def empty_input(self, num_rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return unset x [B, K] and u [B, R] in one tensor [x | u]."""
        x_BK = row_kernel.rows(num_rows, self.in_width, self.room, like)
        return x_BK, self.behind(x_BK)

    def behind(self, x_BK: Tensor) -> Tensor:
        """Return the columns for u behind the rows of x."""
        (B, K), stride = x_BK.shape, x_BK.stride(0)
        assert stride >= K + self.room
        return x_BK.as_strided((B, K + self.room), (stride, 1))[:, K:]

    @property
    def is_interleaved(self) -> bool:
        return self.tiles is not None and self.tiles.rows is UnpackRows.GATE_UP

    def _stacked(self) -> tuple[Tensor, Tensor | None]:
        a_parts, b_parts = zip(*(self._working(linear) for linear in self.linears), strict=True)
        a = torch.cat(a_parts)
        if self.tiles is not None:
            return a, self._in_order(torch.cat(b_parts))
        if self.wide_NC is None:
            return with_rank(a, torch.block_diag(*b_parts), kernel_rank(len(a)))
        return F.pad(a, (0, 0, 0, kernel_rank(len(a)) - len(a))), None

    def _in_order(self, rows_N: Tensor) -> Tensor:
        """Return rows of the linears in the order of the packed ones."""
        return rows_N if self._order_N is None else rows_N[self._order_N]

    def _working(self, linear: QuantLinear) -> tuple[Tensor, Tensor]:
        """Return (a, b) for the scaling and, in tiles, the rank of the group, which are the largest; of a
        linear without an adapter zeros in tiles, else nothing."""
        if linear.a_work is not None and linear.b_work is not None:
            a_RK, b_NR = linear.a_work, linear.b_work
            if linear.scaling != self.scaling:  # exact where the ratio is a power of two
                a_RK = a_RK * (linear.scaling / self.scaling)
            return (a_RK, b_NR) if self.tiles is None else with_rank(a_RK, b_NR, self.rank)
        rank = 0 if self.tiles is None else self.rank
        zeros = torch.zeros(rank, linear.in_width, dtype=linear.compute, device=self._device)
        return zeros, zeros.new_zeros(linear.out_width, rank)

    def _stacked_bias(self) -> Tensor | None:
        """Return [N], in fp32 for tiles; a group has biases or it has none."""
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        assert len(biases) in (0, len(self.linears))
        if not biases:
            return None
        if self.tiles is None:
            return torch.cat(biases)
        return self._in_order(torch.cat(biases).float())


class FusedLinears(Protocol):
    def computes_lora_hidden(self, rows: int, group: LinearGroup) -> bool:
        """True if the product computes u of this many rows; else the caller does, if there are adapters."""
        ...

    def linear(
        self,
        x_BK: Tensor,
        group: LinearGroup,
        u_BR: Tensor | None,
        residual_BN: Tensor | None,
        numbers_B: Tensor | None = None,
    ) -> Tensor:
        """Return y_BN; it may be stored in the residual's memory. numbers_B: of the rows' adapters in the
        group's bank, of which u is; None: the group's own adapter."""
        ...

    def swiglu(
        self,
        x_BK: Tensor,
        group: LinearGroup,
        u_BR: Tensor | None,
        activation: Activation = "silu",
        numbers_B: Tensor | None = None,
    ) -> Tensor:
        """Return activation(gate) * up."""
        ...


class PackedLinears:
    def __init__(
        self,
        device: torch.device,
        rows_at_once: int = MAX_TOKENS,
        *,
        is_portable: bool = False,
        layouts: Collection[TileLayout] = (TileLayout.NVFP4,),
    ):
        """is_portable: NVFP4 by kernels for any GPU from Ampere on, else by those for Hopper; layouts: of the
        model's tiles.

        rows_at_once: rows of one product. With ONE_ORDER_ROWS a row's bits depend on that row alone. More
        rows are several tiles of tokens, and the SMs split the k of each at another place: at 3584 x 3584,
        rows 0..31 and 32..63 of 64 differ in bits (tests/parity/test_exact_hopper.py)."""
        self._kernels = {
            layout: NVFP4Decode(device)
            if layout is TileLayout.NVFP4 and not is_portable
            else PortableProduct(device, layout=layout)
            for layout in layouts
        }
        self._rows_at_once, self._is_portable = rows_at_once, is_portable

    def _adapter(
        self, group: LinearGroup, u_BR: Tensor | None, x_BK: Tensor, numbers_B: Tensor | None
    ) -> PackedAdapter | None:
        """Return the adapter. A single product follows u's launch; a portable one may overlap it."""
        return group.adapter(u_BR, self._is_portable and len(x_BK) <= self._rows_at_once, numbers_B)

    def computes_lora_hidden(self, rows: int, group: LinearGroup) -> bool:
        assert group.tiles is not None
        rows, kernel = min(rows, self._rows_at_once), self._kernels[group.tiles.layout]
        rank_rows = 0 if group.a is None else len(group.a)
        if isinstance(kernel, NVFP4Decode):
            return pays_to_compute_lora_hidden(rows, group.in_width, rank_rows, group.is_interleaved)
        return rank_rows > 0 and kernel.computes_lora_hidden(rows, group.ends[-1], group.in_width, rank_rows)

    def linear(
        self,
        x_BK: Tensor,
        group: LinearGroup,
        u_BR: Tensor | None,
        residual_BN: Tensor | None,
        numbers_B: Tensor | None = None,
    ) -> Tensor:
        assert group.tiles is not None
        kernel, operands = self._kernels[group.tiles.layout], (group.tiles.tiles, group.tiles.factors_N)

        def product(x: Tensor, u: Tensor | None, numbers: Tensor | None, residual: Tensor | None) -> Tensor:
            adapter = self._adapter(group, u, x_BK, numbers)
            return kernel.linear(x, *operands, adapter=adapter, bias_N=group.bias_N, residual_MN=residual)

        return self._by_slices(product, x_BK, u_BR, numbers_B, residual_BN)

    def swiglu(
        self,
        x_BK: Tensor,
        group: LinearGroup,
        u_BR: Tensor | None,
        activation: Activation = "silu",
        numbers_B: Tensor | None = None,
    ) -> Tensor:
        assert group.tiles is not None
        kernel, operands = self._kernels[group.tiles.layout], (group.tiles.tiles, group.tiles.factors_N)

        def product(x: Tensor, u: Tensor | None, numbers: Tensor | None) -> Tensor:
            adapter = self._adapter(group, u, x_BK, numbers)
            return kernel.swiglu(x, *operands, adapter=adapter, bias_N=group.bias_N, activation=activation)

        return self._by_slices(product, x_BK, u_BR, numbers_B)

    def _by_slices(self, product: Callable[..., Tensor], x_BK: Tensor, *others: Tensor | None) -> Tensor:
        if len(x_BK) <= self._rows_at_once:
            return product(x_BK, *others)
        starts = range(0, len(x_BK), self._rows_at_once)
        slices = [slice(start, start + self._rows_at_once) for start in starts]
        return torch.cat(
            [product(*(None if t is None else t[rows] for t in (x_BK, *others))) for rows in slices]
        )


class TorchLinears:
    def __init__(self, swiglu_room: int = 0):
        """swiglu_room: columns behind each row of what `swiglu` returns, for the next product's u."""
        self._swiglu_room = swiglu_room

    def computes_lora_hidden(self, rows: int, group: LinearGroup) -> bool:
        return False

    def linear(
        self,
        x_BK: Tensor,
        group: LinearGroup,
        u_BR: Tensor | None,
        residual_BN: Tensor | None,
        numbers_B: Tensor | None = None,
    ) -> Tensor:
        assert numbers_B is None  # bank_obstacle
        if group.wide_NC is not None:
            x_BC = x_BK if u_BR is None else side_by_side((x_BK, u_BR))
            w_NC = group.wide_NC[:, : x_BC.shape[1]]
            if residual_BN is None:
                return F.linear(x_BC, w_NC, group.bias_N)
            add_product(residual_BN, x_BC, w_NC.T)
            return residual_BN if group.bias_N is None else residual_BN.add_(group.bias_N)
        y_BN = self._frozen(x_BK, group)
        if residual_BN is None:
            return y_BN if u_BR is None or group.b is None else torch.addmm(y_BN, u_BR, group.b.T)
        residual_BN.add_(y_BN)
        return residual_BN if u_BR is None or group.b is None else add_product(residual_BN, u_BR, group.b.T)

    def swiglu(
        self,
        x_BK: Tensor,
        group: LinearGroup,
        u_BR: Tensor | None,
        activation: Activation = "silu",
        numbers_B: Tensor | None = None,
    ) -> Tensor:
        gate_BF, up_BF = self.linear(x_BK, group, u_BR, None, numbers_B).chunk(2, dim=-1)
        return gated(gate_BF, up_BF, activation, room=self._swiglu_room)

    def _frozen(self, x_BK: Tensor, group: LinearGroup) -> Tensor:
        if group.fp8 is not None:
            y_BN = fp8_product(x_BK, group.fp8)
            return y_BN if group.bias_N is None else y_BN.add_(group.bias_N)
        return torch.cat([each.frozen(x_BK) for each in group.linears], dim=-1)
