"""A product of few tokens and a weight in tiles: what the kernels for Hopper and for any GPU have in common.

nvfp4_decode.py has the definition and the layout; it and portable_product.py launch their own kernels.
"""

import abc
import dataclasses
import struct
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from qerl.kernels.pointwise.swiglu import Activation
from qerl.kernels.runtime.architectures import num_sms
from qerl.kernels.runtime.nvrtc import addresses
from qerl.kernels.tiles.nvfp4_tile import MAX_TOKENS, TILE_K, TILE_ROWS
from qerl.kernels.tiles.row_slots import RowSlots
from qerl.kernels.tiles.tile_layout import TileLayout

GATES: dict[Activation, int] = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
"""SWIGLU and GATE of packed_epilogue.cuh in one number, which kernels take as `swiglu`; 0: neither."""
_NO_GROUP = 2**31 - 1


class AnyTile(Protocol):
    """The division of M x N x K into units of work, and of these among CTAs."""

    def units(self, M: int, N: int, K: int) -> int: ...

    def grid(self, M: int, N: int, K: int, num_sms: int) -> int: ...

    def workspace_words(self, num_sms: int) -> int: ...


T = TypeVar("T", bound=AnyTile)


def slots_defines(adapter: "PackedAdapter | None") -> dict[str, int]:
    """Return the constant of an adapter with slots."""
    return {} if adapter is None or adapter.slots is None else {"SLOTS": 1}


def gate_defines(swiglu: int) -> dict[str, int]:
    """Return the constants of the epilogue; GATE only where it is not silu."""
    return {"SWIGLU": int(swiglu > 0)} | ({"GATE": swiglu} if swiglu > 1 else {})


@dataclasses.dataclass(frozen=True, eq=False)
class PackedAdapter:
    """a bfloat16 [G R, K], b bfloat16 [N, R]. Rows from starts[i] on use a's group i + 1, others 0.

    One adapter: starts=(), G = 1. q|k|v: starts=(q rows, q and k rows), multiples of 16, G = 3. `swiglu`:
    starts=(), G = 2 (gate, up), b in the packed row order. lora_hidden: u, bfloat16 [M, G R], if computed
    before. follows_shrink: it comes from `PortableLoraShrink.shrink`, the last launch, and a portable product
    of the same x may run beside it. slots: a [S, G R, K], b [S, N, R] and lora_hidden are of each row's slot.
    """

    a: Tensor
    b: Tensor
    scaling: float
    starts: tuple[int, ...] = ()
    lora_hidden: Tensor | None = None
    follows_shrink: bool = False
    slots: RowSlots | None = None


class PackedProduct(abc.ABC, Generic[T]):
    """Checks the operands, chooses a tile, and packs the kernel's epilogue."""

    def __init__(
        self,
        device: torch.device,
        choose: Callable[[int, int, int], T],
        words_per_sm: int,
        layout: TileLayout = TileLayout.NVFP4,
    ):
        """choose: return a tile for (M, N, K); words_per_sm: of the workspace; layout: of the weights."""
        self._device, self._choose, self._layout = device, choose, layout
        self._num_sms = num_sms(device)
        # -1 marks a word as not written; every launch leaves all words so
        words = words_per_sm * self._num_sms
        self.workspace = torch.full((words,), -1, dtype=torch.int32, device=device)

    def linear(
        self,
        x_MK: Tensor,
        tiles: Tensor,
        factors_N: Tensor,
        *,
        adapter: PackedAdapter | None = None,
        bias_N: Tensor | None = None,
        residual_MN: Tensor | None = None,
    ) -> Tensor:
        """Return y_MN in bfloat16, or in fp32 with an fp32 residual.

        tiles of the layout, fp32 factors of the rows, bias in fp32.
        """
        n, dtype = TILE_ROWS * tiles.shape[0], torch.bfloat16 if residual_MN is None else torch.float32
        y_MN = torch.empty(x_MK.shape[0], n, dtype=dtype, device=x_MK.device)
        if residual_MN is not None:
            assert residual_MN.shape == y_MN.shape and residual_MN.dtype == y_MN.dtype
            assert residual_MN.is_contiguous()
        groups = 1 if adapter is None else len(adapter.starts) + 1
        self._launch(x_MK, tiles, factors_N, adapter, groups, bias_N, residual_MN, y_MN, swiglu=0)
        return y_MN

    def swiglu(
        self,
        x_MK: Tensor,
        tiles: Tensor,
        factors_N: Tensor,
        *,
        adapter: PackedAdapter | None = None,
        bias_N: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        """Return activation(gate) * up [M, F] in bfloat16; tiles, factors, b and bias are in
        `swiglu_order`."""
        features = TILE_ROWS // 2 * tiles.shape[0]
        y_MF = torch.empty(x_MK.shape[0], features, dtype=torch.bfloat16, device=x_MK.device)
        assert adapter is None or not adapter.starts
        gate = GATES[activation]
        self._launch(x_MK, tiles, factors_N, adapter, 2, bias_N, None, y_MF, swiglu=gate)
        return y_MF

    def _launch(self, x_MK, tiles, factors_N, adapter, groups, bias_N, residual_MN, y, *, swiglu) -> None:
        (m, k), n = x_MK.shape, TILE_ROWS * tiles.shape[0]
        assert x_MK.dtype == torch.bfloat16 and x_MK.is_contiguous() and x_MK.data_ptr() % 16 == 0
        assert 1 <= m <= MAX_TOKENS
        assert tiles.shape == (n // TILE_ROWS, k // TILE_K, self._layout.tile_bytes) and tiles.is_contiguous()
        for rows in (factors_N, bias_N):
            assert rows is None or (
                rows.shape == (n,) and rows.dtype == torch.float32 and rows.is_contiguous()
            )
        rank, starts = 0, ()
        if adapter is not None:
            rank, starts = adapter.b.shape[-1], adapter.starts
            assert adapter.b.shape[-2:] == (n, rank) and adapter.a.shape[-2:] == (groups * rank, k)
            assert rank % 16 == 0
            u_MR = adapter.lora_hidden
            if (slots := adapter.slots) is not None:
                slots.check(m, len(adapter.b))
                assert len(adapter.a) == len(adapter.b) and u_MR is not None
            assert adapter.a.dim() == adapter.b.dim() == (2 if slots is None else 3)
            assert u_MR is None or (u_MR.shape == (m, groups * rank) and u_MR.dtype == torch.bfloat16)
            assert u_MR is None or (u_MR.is_contiguous() and u_MR.data_ptr() % 16 == 0)
            assert adapter.b.dtype == adapter.a.dtype == torch.bfloat16 and len(starts) <= 2
            assert (
                adapter.b.is_contiguous() and adapter.a.is_contiguous() and all(s % 16 == 0 for s in starts)
            )
        slots_M = adapter and adapter.slots and adapter.slots.slots_M
        pointers = addresses(factors_N, bias_N, adapter and adapter.b, residual_MN, y, slots_M)
        epilogue = struct.pack("6Q4i", *pointers, m, n, *(*starts, _NO_GROUP, _NO_GROUP)[:2])
        tile = self._choose(m, n, k)
        grid = tile.grid(m, n, k, self._num_sms)
        assert tile.units(m, n, k) * grid < 2**32  # the kernel divides 32-bit numbers
        assert tile.workspace_words(self._num_sms) <= len(self.workspace)
        self._start(tile, grid, rank, swiglu, x_MK, tiles, adapter, epilogue)

    @abc.abstractmethod
    def _start(self, tile, grid, rank, swiglu, x_MK, tiles, adapter, epilogue) -> None:
        """Launch the kernel of this tile, rank and epilogue; epilogue: the struct of packed_epilogue.cuh."""
