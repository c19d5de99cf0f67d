"""x = norm(h) and u = scaling * x @ A^T in one launch: the steps before a linear with LoRA adapters.

    x_MK = bf16(h_MK / sqrt(mean_k(h^2) + eps) * (weight_K + noise))        or, for `shrink`, x_MK is given
    u_MR = bf16(scaling * x_MK @ a_RK^T)

M tokens (1 to 256), K input features (a multiple of 64), R rows of all adapters that read x, stacked (a
multiple of 16, up to 384). h, weight and noise are fp32; x, a and u are bfloat16; sums are fp32, of the
rounded x. The noise is a vector [K], or with rows_M a table with one row index per token. With slots a has
those of several slots, [S, R, K] (row_slots.py).

A cluster of CTAs splits K and adds its sums through distributed shared memory. The split depends on K alone,
and a token's sums never mix with another token's, so its row is bitwise the same at any M
(tests/kernels/tiles/test_lora_shrink.py). On an H200 the four launches of a 7B layer (3584 k twice with the
norm,
3584, 18944; rank 32) add 8 us to its GEMMs at 8 tokens, 17 at 64, 29 at 256. a, weight and noise are loaded
before the previous kernel has ended, so no kernel that allows an early launch of this one may write them.
This package's CUDA kernels allow it, torch's do not.
"""

import dataclasses
import struct

import torch
from torch import Tensor

from qerl.kernels.pointwise.rms_norm import check_noise
from qerl.kernels.runtime.nvrtc import addresses, cached_method, compiled
from qerl.kernels.tiles.row_slots import RowSlots

CASES = (
    (1, 896, 16),
    (8, 3584, 96),
    (17, 1152, 48),
    (33, 8192, 64),
    (64, 18944, 32),
    (100, 64, 128),
    (256, 2048, 384),
)
MAX_TOKENS, MAX_ROWS = 256, 384
WARPS = 8
_UNIT = 32
CTAS_AT_ONCE = 200  # more and narrower token tiles are faster up to here (H200)


def reference(
    h_MK: Tensor, weight_K: Tensor, noise_K: Tensor | None, eps: float, a_RK: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return (x, u) in float64 without rounding."""
    h_MK = h_MK.double()
    weight_K = weight_K.double() if noise_K is None else weight_K.double() + noise_K.double()
    x_MK = h_MK / (h_MK.square().mean(-1, keepdim=True) + eps).sqrt() * weight_K
    return x_MK, scaling * x_MK @ a_RK.double().T


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Split(cluster=8, units=2): 8 CTAs of 8 warps split K; each warp has up to 2 units of 32."""

    cluster: int
    units: int


def choose_split(K: int) -> Split:
    """Use a cluster of 16, which is harder to schedule, only if a warp would have more than 4 units."""
    assert K % 64 == 0
    for cluster in (8, 16):
        split = Split(cluster, _ceil(_ceil(K // _UNIT, cluster), WARPS))
        if split.units <= 4:
            break
    return split


@dataclasses.dataclass(frozen=True, slots=True)
class ShrinkTile:
    """ShrinkTile(tokens=8, rows=32): the tile of a cluster; rows=0: the norm alone."""

    tokens: int
    rows: int

    def clusters(self, M: int, R: int) -> int:
        return _ceil(M, self.tokens) * (_ceil(R, self.rows) if self.rows else 1)


def choose_tile(M: int, K: int, R: int, ctas_at_once: int = CTAS_AT_ONCE) -> ShrinkTile:
    """Use the fewest tokens per tile whose clusters all run at once, as far as registers allow."""
    assert 1 <= M <= MAX_TOKENS and R % 16 == 0 and 0 <= R <= MAX_ROWS
    split = choose_split(K)
    rows = 0 if R == 0 else 16 if R == 16 or split.units > 3 else 32
    tiles = [ShrinkTile(tokens, rows) for tokens in (8, 16, 32) if tokens * split.units <= 160 or tokens == 8]
    return next((tile for tile in tiles if tile.clusters(M, R) * split.cluster <= ctas_at_once), tiles[-1])


class LoraShrink:
    """The kernels of one device, compiled on first use. Use one object per stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._kernel = cached_method(self._compile)

    def embed(self, tokens_B: Tensor, table_VD: Tensor) -> Tensor:
        """Return rows of the table [B, D] in fp32; tokens outside it, as in unused rows, are clamped."""
        (b,), (v, d) = tokens_B.shape, table_VD.shape
        assert tokens_B.dtype == torch.int32 and tokens_B.is_contiguous() and d % 8 == 0
        _check(table_VD, (v, d), torch.bfloat16)
        assert table_VD.is_contiguous()
        h_BD = torch.empty(b, d, dtype=torch.float32, device=tokens_B.device)
        embed = self._kernel("embed", False, False, ShrinkTile(8, 0), Split(1, 1), False)
        embed.launch(grid=b, block_threads=256, parameters=(tokens_B, table_VD, h_BD, v, d // 4))
        return h_BD

    def norm(
        self,
        h_MD: Tensor,
        weight_D: Tensor,
        noise: Tensor | None,
        eps: float,
        *,
        rows_M: Tensor | None = None,
    ) -> Tensor:
        """Return x_MD."""
        x_MD = torch.empty(h_MD.shape, dtype=torch.bfloat16, device=h_MD.device)
        self._launch(h_MD, weight_D, noise, rows_M, eps, None, 0.0, x_MD, None, None)
        return x_MD

    def norm_shrink(
        self,
        h_MD: Tensor,
        weight_D: Tensor,
        noise: Tensor | None,
        eps: float,
        a_RD: Tensor,
        scaling: float,
        *,
        rows_M: Tensor | None = None,
        out: tuple[Tensor, Tensor] | None = None,
        slots: RowSlots | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (x_MD, u_MR). The rows of `out` may lie apart, as in the halves of one tensor [x | u].
        slots: a is [S, R, D], and scaling is not read."""
        x_MD = _output(h_MD.shape, h_MD.device, None if out is None else out[0])
        u_MR = _output((h_MD.shape[0], a_RD.shape[-2]), h_MD.device, None if out is None else out[1])
        self._launch(h_MD, weight_D, noise, rows_M, eps, a_RD, scaling, x_MD, u_MR, slots)
        return x_MD, u_MR

    def shrink(
        self,
        x_MK: Tensor,
        a_RK: Tensor,
        scaling: float,
        *,
        out: Tensor | None = None,
        copy: Tensor | None = None,
        slots: RowSlots | None = None,
    ) -> Tensor:
        """Return u_MR of a given x; `copy`, if given, is filled with x. slots: as for norm_shrink."""
        u_MR = _output((x_MK.shape[0], a_RK.shape[-2]), x_MK.device, out)
        if copy is not None:
            _check(copy, x_MK.shape, torch.bfloat16)
        self._launch(x_MK, None, None, None, 0.0, a_RK, scaling, copy, u_MR, slots)
        return u_MR

    def _launch(self, h_MK, weight_K, noise, rows_M, eps, a_RK, scaling, x_MK, u_MR, slots) -> None:
        operands = pack_operands(h_MK, weight_K, noise, rows_M, eps, a_RK, scaling, x_MK, u_MR, slots)
        (m, k), rows = h_MK.shape, 0 if a_RK is None else a_RK.shape[-2]
        split, tile = choose_split(k), choose_tile(m, k, rows)
        has = weight_K is not None, rows_M is not None
        kernel = self._kernel("shrink", *has, tile, split, slots is not None)
        clusters = tile.clusters(m, rows) * (1 if slots is None else len(a_RK))
        kernel.launch(grid=clusters * split.cluster, block_threads=32 * WARPS, parameters=(operands,))

    def _compile(
        self, name: str, has_norm: bool, has_table: bool, tile: ShrinkTile, split: Split, has_slots: bool
    ):
        defines = {"NORM": int(has_norm), "TABLE": int(has_table)} | shrink_defines(tile, split, has_slots)
        return compiled("lora_shrink.cu", name, self._device, defines, cluster=split.cluster)


def shrink_defines(tile: ShrinkTile, split: Split, has_slots: bool) -> dict[str, int]:
    return {
        "TOKEN_TILES": tile.tokens // 8,
        "ROW_TILES": tile.rows // 16,
        "UNITS": split.units,
        "WARPS": WARPS,
        "CLUSTER": split.cluster,
    } | ({"SLOTS": 1} if has_slots else {})


def pack_operands(h_MK, weight_K, noise, rows_M, eps, a_RK, scaling, x_MK, u_MR, slots) -> bytes:
    """Return the kernels' `Operands` (lora_shrink.cuh) after checking the tensors."""
    m, k = h_MK.shape
    _check(h_MK, (m, k), torch.bfloat16 if weight_K is None else torch.float32)
    if weight_K is not None:
        _check(weight_K, (k,), torch.float32)
    check_noise(noise, rows_M, m, k)
    rows = 0
    if a_RK is not None:
        rows = a_RK.shape[-2]
        _check(a_RK, (rows, k) if slots is None else (len(a_RK), rows, k), torch.bfloat16)
        assert a_RK.is_contiguous()
    by_slot = (None, None)
    if slots is not None:
        slots.check(m, len(a_RK))
        by_slot = slots.slots_M, slots.scalings_S
    pointers = addresses(h_MK, weight_K, noise, rows_M, *by_slot, a_RK, x_MK, u_MR)
    strides = (0 if t is None else t.stride(0) for t in (h_MK, x_MK, u_MR))
    return struct.pack("9Q6i2f", *pointers, m, k, rows, *strides, eps, scaling)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _check(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert tensor.shape == shape and tensor.dtype == dtype, (tensor.shape, tensor.dtype, shape, dtype)
    assert tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
    assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])


def _output(shape: tuple[int, ...], device: torch.device, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    _check(out, shape, torch.bfloat16)
    return out
