"""lora_shrink.py without thread-block clusters: runs from Ampere on, and gives the same bits.

The norm is a launch of its own, one CTA for each token. `shrink` splits K among as many CTAs as a cluster
has; they pass their sums through global memory, and the last to arrive adds them in the order of k. So for
any M a token's sums have the order of lora_shrink.cu (tests/kernels/tiles/test_lora_shrink.py).
"""

import dataclasses

import torch
from torch import Tensor

from qerl.kernels.runtime.architectures import num_sms
from qerl.kernels.runtime.nvrtc import compiled
from qerl.kernels.tiles.lora_shrink import (
    CTAS_AT_ONCE,
    MAX_ROWS,
    MAX_TOKENS,
    WARPS,
    LoraShrink,
    ShrinkTile,
    Split,
    choose_split,
    choose_tile,
    pack_operands,
    shrink_defines,
)

FILE = "lora_shrink_portable.cu"
_MIN_CLUSTER, _MAX_CLUSTER = 8, 16  # of choose_split
_NORM_TILE = ShrinkTile(8, 16)  # any: norm_rows does not read it
_H200_SMS = 132
_MAX_UNITS = 5  # of a warp with 32 tokens and 32 rows: more would spill


class PortableLoraShrink(LoraShrink):
    """LoraShrink from Ampere on. 6.3 MB of memory are for the sums that CTAs pass on, more with slots."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._num_sms = num_sms(device)
        self._ctas_at_once = CTAS_AT_ONCE * self._num_sms // _H200_SMS
        words = _MAX_CLUSTER * MAX_TOKENS * MAX_ROWS
        self._partials = torch.empty(words, dtype=torch.float32, device=device)
        self._turns = torch.zeros(MAX_TOKENS // 8 * (MAX_ROWS // 16), dtype=torch.int32, device=device)
        self._of_slots: list[
            tuple[Tensor, Tensor]
        ] = []  # the last is in use, recorded graphs have the others

    def _launch(self, h_MK, weight_K, noise, rows_M, eps, a_RK, scaling, x_MK, u_MR, slots) -> None:
        (m, k), split = h_MK.shape, choose_split(h_MK.shape[1])
        copy_MK = x_MK
        if weight_K is not None:
            operands = pack_operands(h_MK, weight_K, noise, rows_M, eps, None, 0.0, x_MK, None, None)
            norm = self._kernel("norm_rows", True, rows_M is not None, _NORM_TILE, split, False)
            norm.launch(grid=m, block_threads=norm_threads(split), parameters=(operands,))
            h_MK, copy_MK = x_MK, None
        if a_RK is not None:
            operands = pack_operands(h_MK, None, None, None, 0.0, a_RK, scaling, copy_MK, u_MR, slots)
            tile, rows = self._tile(m, k, a_RK.shape[-2], split), a_RK.shape[-2]
            clusters, sums = tile.clusters(m, rows), (self._partials, self._turns)
            if slots is not None:
                clusters *= len(a_RK)
                sums = self._sums_of_slots(clusters, clusters * split.cluster * tile.tokens * tile.rows)
            shrink = self._kernel("shrink", False, False, tile, split, slots is not None)
            parameters, grid = (operands, *sums), clusters * split.cluster
            shrink.launch(grid=grid, block_threads=32 * WARPS, parameters=parameters)

    def _sums_of_slots(self, clusters: int, words: int) -> tuple[Tensor, Tensor]:
        """Return partials and turns of at least these sizes."""
        if not self._of_slots or len(self._of_slots[-1][0]) < words or len(self._of_slots[-1][1]) < clusters:
            before = self._of_slots[-1] if self._of_slots else (self._partials[:0], self._turns[:0])
            sizes = max(words, len(before[0])), max(clusters, len(before[1]))
            partials = torch.empty(sizes[0], dtype=torch.float32, device=self._device)
            turns = torch.zeros(sizes[1], dtype=torch.int32, device=self._device)
            self._of_slots.append((partials, turns))
        return self._of_slots[-1]

    def _tile(self, M: int, K: int, R: int, split: Split) -> ShrinkTile:
        """Return a tile of twice the rows if half the rows of a long K take more CTAs than run at once."""
        tile = choose_tile(M, K, R, self._ctas_at_once)
        is_too_many = tile.clusters(M, R) * split.cluster > self._num_sms
        is_half = tile.rows == 16 and R > 16 and split.units <= _MAX_UNITS
        return dataclasses.replace(tile, rows=32) if is_too_many and is_half else tile

    def _compile(
        self, name: str, has_norm: bool, has_table: bool, tile: ShrinkTile, split: Split, has_slots: bool
    ):
        if name == "embed":  # of the same source, whose other kernels must compile too
            tile, split = _NORM_TILE, Split(_MIN_CLUSTER, 1)
        defines = {"TABLE": int(has_table), **shrink_defines(tile, split, has_slots)}
        return compiled(FILE, name, self._device, defines)


def norm_threads(split: Split) -> int:
    """Return the threads of norm_rows: four for each warp of a cluster."""
    return split.cluster * WARPS * 4
