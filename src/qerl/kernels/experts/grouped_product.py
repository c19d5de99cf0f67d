"""The products of all experts of a layer in one launch, for few rows and weights in NVFP4 tiles.

    y_SN[s] = alpha_EN[e] * x[row(s)] @ (codes * scales)_ENK[e]^T + bias_EN[e]    for the rows s of expert e
    y_SF = silu(gate) * up        where [gate, up] is such a y with N = 2 F; or that of clamped_swiglu.py
    with adapters y_SN[s] += scaling * (x[row(s)] @ a_ERK[e]^T) @ b_ENR[e]^T

Rows are sorted by expert on the device (moe_route.py), so the grid is fixed and the host waits for nothing:
CTAs walk over units of one item, up to `PortableTile.tokens` rows of an expert, and one tile of its weight.
Every sum runs over all k in one order, so a row's bits do not depend on the other rows of the step. The
kernel is for any GPU from Ampere on, Hopper included: with few rows for each expert it is bound by memory.

The tiles are those of nvfp4_decode.py with a leading dimension, those of a SwiGLU in `swiglu_order`.
Letters: S sorted rows, E experts, N output and K input features, F half of N, R the adapters' rank.
"""

import dataclasses
import enum
import functools
import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl.kernels.experts.clamped_swiglu import reference as clamped_reference
from qerl.kernels.experts.grouped_linear import reference as linear_reference
from qerl.kernels.experts.moe_route import Routed
from qerl.kernels.pointwise.swiglu import reference as swiglu_reference
from qerl.kernels.runtime.architectures import CudaArchitecture, architecture_of, num_sms
from qerl.kernels.runtime.nvrtc import addresses, cached_method, compiled
from qerl.kernels.tiles.nvfp4_tile import TILE_BYTES, TILE_K, TILE_ROWS
from qerl.kernels.tiles.portable_tile import PortableTile

FILE, NAME = "grouped_product.cu", "grouped_product"
SHRINK_FILE, SHRINK_NAME = "expert_shrink.cu", "expert_shrink"
RANKS = (4, 8, 12, 16)
CASES = ((5760, 2880), (2880, 2880), (1536, 2048), (2048, 768))  # N, K
ITEM_ROWS = (8, 16, 32, 64)
_K_BLOCKS = (256, 192, 128, 64)
_MAX_STAGES, _MIN_STAGES = 8, 3
_MAX_BYTES = 160 << 10  # of the stages of a CTA
_MEASURED_BYTES = 200 << 10  # shared memory of a multiprocessor
_NARROW_ROWS = 4096
_SHRINK_THREADS = 256


class AdapterRows(enum.IntEnum):
    """The order of B's rows."""

    AS_TILES = 0
    GATE_UP = 1
    """All of gate, then all of up."""
    ALTERNATING = 2
    """Gate 0, up 0, gate 1, ..."""


class ExpertAdapter(NamedTuple):
    """The adapters of one linear of each expert; a or b with a leading dimension of 1 is that of all."""

    a_ERK: Tensor
    """bfloat16."""
    b_ENR: Tensor
    """bfloat16, rows in the order of `rows`."""
    scaling: float
    rows: AdapterRows


class TiledExperts(NamedTuple):
    """The weights of one linear of each expert."""

    tiles: Tensor
    """uint8 [E, N / 64, K / 64, 2304]."""
    factors_EN: Tensor
    """fp32: `nvfp4_decode.row_factors` of each expert, in the order of the tiles."""
    bias_EN: Tensor | None
    """fp32, in the same order."""
    adapter: ExpertAdapter | None = None


class Activation(NamedTuple):
    """Activation(None, 7.0): SwiGLU. Activation(1.702, 7.0): the clamped one of gpt-oss."""

    alpha: float | None
    limit: float


def reference(
    x_SK: Tensor,
    offsets: list[int],
    weights_ENK: Tensor,
    bias_EN: Tensor | None = None,
    activation: Activation | None = None,
    adapter: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Compute the definition in float64. Rows of a SwiGLU's weights, and of b_ENR: gate, then up."""
    y_SN = linear_reference(x_SK, offsets, weights_ENK, bias_EN, *(adapter or (None, None, 0.0)))
    if activation is None:
        return y_SN
    gate_SF, up_SF = y_SN.chunk(2, 1)
    if activation.alpha is None:
        return swiglu_reference(gate_SF, up_SF)
    return clamped_reference(gate_SF, up_SF, alpha=activation.alpha, limit=activation.limit)


def defines_of(
    tile: PortableTile, swiglu: int, gather: bool, rank: int = 0, order: int = 0
) -> dict[str, int]:
    """Return the constants of a product. swiglu: 0 none, 1 plain, 2 clamped. gather: x has the rows of the
    step, not sorted ones; then the plan may be from the previous kernel. rank: of the adapters; 0 is none.
    order: an AdapterRows."""
    adapter = {"RANK": rank, "ORDER": order} if rank else {}
    return adapter | {
        "MT": tile.tokens,
        "WR": tile.row_warps,
        "R16": tile.row_blocks,
        "KB": tile.k_block,
        "STAGES": tile.stages,
        "CTAS": tile.ctas_per_sm,
        "SWIGLU": swiglu,
        "GATHER": int(gather),
        "EARLY": int(not gather),
    }


def item_rows(rows: int, num_chosen: int, num_experts: int) -> int:
    """Return the maximum rows of an item: few experts have more if rows are spread evenly."""
    mean = rows * num_chosen / num_experts
    wanted = min(rows, mean + 2 * math.sqrt(mean))
    return next((n for n in ITEM_ROWS if n >= wanted), ITEM_ROWS[-1])


@functools.lru_cache(maxsize=256)
def grouped_tile(tokens: int, N: int, K: int, card: CudaArchitecture) -> PortableTile:
    """Return the tile for items of up to this many rows: the fastest measured form, with the widest k that
    leaves three stages; where none was measured, as many CTAs and k as leave room for four stages."""
    assert tokens in ITEM_ROWS and K % TILE_K == 0
    k_blocks = [k for k in _K_BLOCKS if K % k == 0]
    forms = _fastest_forms(tokens, N) if card.sm_shared_bytes >= _MEASURED_BYTES else ()
    for k_block in k_blocks:
        for row_warps, row_blocks, ctas in forms:
            tile = _deepest(PortableTile(tokens, row_warps, 1, row_blocks, k_block, 1, ctas), card)
            if tile.stages >= _MIN_STAGES:
                return tile
    row_blocks, max_ctas = (1, 3) if tokens <= 16 else (2, 2)
    for min_stages in (4, _MIN_STAGES):
        for ctas in range(max_ctas, 0, -1):
            for k_block in k_blocks:
                tile = _deepest(PortableTile(tokens, 4, 1, row_blocks, k_block, 1, ctas), card)
                if tile.stages >= min_stages:
                    return tile
    raise AssertionError(f"no tile of {tokens} rows fits {card}")


def _fastest_forms(tokens: int, N: int) -> tuple[tuple[int, int, int], ...]:
    """Return (row_warps, row_blocks, ctas_per_sm) in order: what was fastest on an H200 for gpt-oss-20b at 64
    and 256 rows and Qwen3-30B-A3B at 256."""
    if tokens == 64:  # a narrow weight's tiles are three rounds of one CTA, but one and a half of two
        return ((8, 2, 1),) if N <= _NARROW_ROWS else ((4, 4, 2),)
    return {16: ((4, 2, 3), (4, 2, 2)), 32: ((8, 1, 2),)}.get(tokens, ())


def _deepest(tile: PortableTile, card: CudaArchitecture) -> PortableTile:
    """Return the tile with as many stages as this card has room for."""
    room = min(card.shared_bytes, card.sm_shared_bytes // tile.ctas_per_sm - 1024, _MAX_BYTES)
    return dataclasses.replace(tile, stages=min(room // tile.stage_bytes, _MAX_STAGES))


class GroupedProduct:
    """The kernels of one device, compiled on first use."""

    gathers = True
    """`swiglu` takes the rows of the step; if False, sorted ones."""

    def __init__(self, device: torch.device):
        self._device, self._card = device, architecture_of(device)
        self._num_sms = num_sms(device)
        self._kernel = cached_method(self._compile)
        self._shrink_kernel = cached_method(self._compile_shrink)

    def swiglu(self, x: Tensor, experts: TiledExperts, routed: Routed, activation: Activation) -> Tensor:
        """Return y_SF in bfloat16, sorted by expert."""
        kind = 1 if activation.alpha is None else 2
        y_SF = self._empty(routed, TILE_ROWS // 2 * experts.tiles.shape[1])
        assert len(x) == len(routed.places_BK if self.gathers else routed.rows_S)
        self._launch(x, experts, routed, y_SF, kind, True, activation)
        return y_SF

    def linear(self, x_SK: Tensor, experts: TiledExperts, routed: Routed) -> Tensor:
        """Return y_SN in bfloat16 of rows sorted by expert.

        The launch before it must not be the one that made `routed`: it reads the plan early."""
        y_SN = self._empty(routed, TILE_ROWS * experts.tiles.shape[1])
        assert len(x_SK) == len(routed.rows_S)
        self._launch(x_SK, experts, routed, y_SN, 0, False, Activation(None, 0.0))
        return y_SN

    def _empty(self, routed: Routed, width: int) -> Tensor:
        return torch.empty(len(routed.rows_S), width, dtype=torch.bfloat16, device=self._device)

    def _launch(self, x, experts, routed, y, swiglu: int, is_first: bool, activation) -> None:
        num_experts, n, k = len(experts.tiles), TILE_ROWS * experts.tiles.shape[1], x.shape[1]
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % 16 == 0
        assert experts.tiles.shape == (num_experts, n // TILE_ROWS, k // TILE_K, TILE_BYTES)
        assert experts.tiles.is_contiguous() and experts.tiles.data_ptr() % 16 == 0
        for values in (experts.factors_EN, experts.bias_EN):
            assert values is None or (values.shape == (num_experts, n) and values.dtype == torch.float32)
            assert values is None or values.is_contiguous()
        adapter: ExpertAdapter | None = experts.adapter
        u_SR = None if adapter is None else self._shrink(x, adapter, n, routed, is_first and self.gathers)
        tensors = experts.tiles, experts.factors_EN, experts.bias_EN, x, y, routed.plan, routed.rows_S
        operands = struct.pack(
            "7Q2i2f", *addresses(*tensors), n, k, activation.alpha or 0.0, activation.limit
        )
        if adapter is not None:
            stride = 0 if len(adapter.b_ENR) == 1 else adapter.b_ENR.stride(0)
            operands += struct.pack("2Qi4x", *addresses(adapter.b_ENR, u_SR), stride)
        low_rank = (0, 0) if adapter is None else (adapter.a_ERK.shape[1], int(adapter.rows))
        self._start(x, operands, n, routed, (swiglu, is_first, *low_rank))

    def _start(self, x: Tensor, operands: bytes, n: int, routed: Routed, form: tuple) -> None:
        tile = grouped_tile(routed.item_rows, n, x.shape[1], self._card)
        self._kernel(tile, *form).launch(
            grid=min(len(routed.rows_S) * -(-n // tile.rows), self._num_sms * tile.ctas_per_sm),
            block_threads=tile.threads,
            parameters=(operands,),
        )

    def _shrink(self, x: Tensor, adapter: ExpertAdapter, n: int, routed: Routed, gather: bool) -> Tensor:
        """Return u_SR = scaling * x[row(s)] @ a_ERK[e]^T in fp32."""
        a, b, S = adapter.a_ERK, adapter.b_ENR, len(routed.rows_S)
        rank, k = a.shape[1:]
        assert rank in RANKS and k == x.shape[1] and b.shape[1:] == (n, rank)
        for each in (a, b):
            assert each.dtype == torch.bfloat16 and each.is_contiguous() and each.data_ptr() % 16 == 0
        u_SR = torch.empty(S, rank, device=self._device)
        stride = 0 if len(a) == 1 else a.stride(0)
        pointers = addresses(a, x, u_SR, routed.plan, routed.rows_S)
        self._shrink_kernel(rank, gather).launch(
            grid=S,
            block_threads=_SHRINK_THREADS,
            parameters=(struct.pack("5Q2if4x", *pointers, k, stride, adapter.scaling),),
        )
        return u_SR

    def _compile(self, tile: Any, swiglu: int, is_first: bool, rank: int, order: int):
        defines = defines_of(tile, swiglu, is_first, rank, order)
        return compiled(FILE, NAME, self._device, defines, shared_bytes=tile.shared_bytes)

    def _compile_shrink(self, rank: int, gather: bool):
        return compiled(SHRINK_FILE, SHRINK_NAME, self._device, {"RANK": rank, "GATHER": int(gather)})
