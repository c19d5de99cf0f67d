"""The tile of a portable packed product: tokens x rows x k_block of one stage in shared memory.

    rows     16 * row_warps * row_blocks; a warp multiplies 16 * row_blocks of them by tokens / token_warps
    choice   the tile up to some number of tokens, before K and the card's memory are known
    rule     for a card that nobody measured: what is fast on an H200, with k blocks that fit its memory

Up to 32 tokens there is one choice per (N, K), so that the split of K, and with it a row's bits, are the same
at any M. portable_table.py has the measured choices.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from qerl.kernels.runtime.architectures import CudaArchitecture
from qerl.kernels.runtime.nvrtc import KernelVariant
from qerl.kernels.tiles.nvfp4_tile import TILE_K, TILE_ROWS, TOKEN_BOUNDS
from qerl.kernels.tiles.packed_product import gate_defines
from qerl.kernels.tiles.tile_layout import TileLayout

FILE, NAME = "portable_product.cu", "portable_product"
TOKEN_TILES = (8, 16, 24, 32, 48, 64, 96, 128)
K_BLOCKS = (512, 256, 192, 128, 64)
MAX_SUMS_PER_SM = 256 * 128  # of all CTAs of a multiprocessor
_MAX_STAGES, _MIN_STAGES = 8, 3  # one is multiplied, one is filled, one is ready
_MAX_SUMS = 128  # fp32 sums of a thread; up to 64 bytes of it spill at a tile's end, none in the loop
_TALL = 2**14  # rows of a weight: of fewer, each tile of 256 rows would be the sum of 5 to 19 CTAs' parts
_NARROW = 2**25  # elements of a weight with few rows of tiles: q|k|v and o of 7B


@dataclasses.dataclass(frozen=True, slots=True)
class PortableTile:
    """PortableTile(8, row_warps=4, token_warps=1, row_blocks=1, k_block=512, stages=4, ctas_per_sm=2)."""

    tokens: int
    row_warps: int
    token_warps: int
    row_blocks: int
    k_block: int
    stages: int
    ctas_per_sm: int
    layout: TileLayout = TileLayout.NVFP4

    @property
    def rows(self) -> int:
        return 16 * self.row_warps * self.row_blocks

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.token_warps

    @property
    def sums(self) -> int:
        """Fp32 sums of a thread."""
        return self.row_blocks * self.tokens // self.token_warps // 2

    @property
    def stage_bytes(self) -> int:
        weight_tiles = self.rows // TILE_ROWS * self.k_block // TILE_K
        return self.tokens * self.k_block * 2 + weight_tiles * self.layout.tile_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes

    def units(self, M: int, N: int, K: int) -> int:
        return -(-N // self.rows) * -(-M // self.tokens) * (K // self.k_block)

    def grid(self, M: int, N: int, K: int, num_sms: int) -> int:
        """Return the number of CTAs: at most what runs at once, and each has work: others wait for it."""
        return min(self.units(M, N, K), num_sms * self.ctas_per_sm)

    def padded(self, M: int) -> int:
        """Return the tokens of all tiles of M tokens."""
        return -(-M // self.tokens) * self.tokens

    def workspace_words(self, num_sms: int) -> int:
        return num_sms * self.ctas_per_sm * self.rows * self.tokens

    def variant(self, rank: int, swiglu: int, extra: dict[str, int] | None = None) -> KernelVariant:
        defines = tuple(sorted((self.defines(rank, swiglu) | (extra or {})).items()))
        return KernelVariant(FILE, NAME, defines, self.threads, self.shared_bytes)

    def defines(self, rank: int, swiglu: int) -> dict[str, int]:
        return {
            "MT": self.tokens,
            "WR": self.row_warps,
            "WM": self.token_warps,
            "R16": self.row_blocks,
            "KB": self.k_block,
            "STAGES": self.stages,
            "CTAS": self.ctas_per_sm,
            "RANK": rank,
            **gate_defines(swiglu),
            "FORMAT": self.layout.define,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class PortableChoice:
    """A tile's settings up to some number of tokens: token_tiles=1, row_warps=4, ..., ctas_per_sm=2."""

    token_tiles: int
    """Number of tiles for M tokens; each weight is decoded this many times."""
    row_warps: int
    token_warps: int
    row_blocks: int
    k_block: int
    ctas_per_sm: int

    def tile(
        self, M: int, K: int, card: CudaArchitecture, layout: TileLayout = TileLayout.NVFP4
    ) -> PortableTile | None:
        """Return the tile with as many stages as fit; None if too few do, or the registers do not."""
        width = 8 * self.token_warps
        tokens = next((n for n in TOKEN_TILES if n * self.token_tiles >= M and n % width == 0), None)
        k_block = next(k for k in K_BLOCKS if k <= self.k_block and K % k == 0)
        if tokens is None:
            return None
        forms = self.row_warps, self.token_warps, self.row_blocks
        one = PortableTile(tokens, *forms, k_block, 1, self.ctas_per_sm, layout)
        free_bytes = min(card.shared_bytes, card.sm_shared_bytes // self.ctas_per_sm - 1024)
        stages = min(free_bytes // one.stage_bytes, _MAX_STAGES)
        fits = one.sums <= _MAX_SUMS and one.workspace_words(1) <= MAX_SUMS_PER_SM
        if stages < _MIN_STAGES or not fits or one.rows % TILE_ROWS:
            return None
        tile = dataclasses.replace(one, stages=stages)
        registers = min(tile.sums + 70, 255)  # an estimate; the launch bounds hold the compiler to it
        resident = card.resident_ctas(tile.threads, registers, tile.shared_bytes)
        return tile if resident >= self.ctas_per_sm else None


def candidates(max_tokens: int, K: int, card: CudaArchitecture) -> list[PortableChoice]:
    """Return the choices to measure up to max_tokens tokens, one for each tile."""
    choices: dict[PortableTile, PortableChoice] = {}
    all_token_tiles = (1,) if max_tokens <= 64 else (1, 2) if max_tokens <= 128 else (2, 3, 4)
    for token_tiles, form in itertools.product(all_token_tiles, _forms(max_tokens)):
        choice = PortableChoice(token_tiles, *form)
        tile = choice.tile(max_tokens, K, card)
        if tile is not None:
            choices[tile] = choice
    return list(choices.values())


def rule(
    M: int, N: int, K: int, card: CudaArchitecture, layout: TileLayout = TileLayout.NVFP4
) -> PortableTile:
    """Return the first tile that the card has room for, of those that are fast on an H200. With codes of 8
    bits k blocks are half as long, so that a stage has as many bytes."""
    longer = 1 if layout.code_bytes == TileLayout.NVFP4.code_bytes else 2
    bound = next(bound for bound in TOKEN_BOUNDS if bound >= M)
    is_narrow = N * K <= _NARROW
    if bound <= 32:
        forms = [(1, 4, 1, 1, 512, 2)] if is_narrow else [(1, 4, 1, 1, 256, ctas) for ctas in (4, 3)]
    elif bound <= 64 and (is_narrow or N < _TALL):
        forms = [(1, 4, 2, 1, 256, 1) if is_narrow else (1, 8, 1, 1, 256, 1)]
    elif is_narrow:
        forms = [(-(-bound // 64), 4, 1, 1, 128, 2) if bound <= 128 else (-(-bound // 64), 4, 1, 2, 256, 1)]
    elif bound > 64 and N >= _TALL and longer == 1:  # codes of 8 bits and 128 sums spill 136 bytes on sm_120a
        forms = [(-(-bound // 128), 8, 1, 2, 128, 1)]
    elif longer == 2 and bound <= 64 and PortableChoice(1, 4, 1, 2, 128, 2).tile(64, K, card, layout):
        forms = [(1, 4, 1, 2, 256, 2)]
    else:
        forms = [(-(-bound // 64), 8, 1, 2, 256, 1)]
    smallest = [(-(-bound // 64), 4, 1, 1, 64, 1)]
    for token_tiles, row_warps, token_warps, row_blocks, k_block, ctas in (*forms, *smallest):
        for k, c in itertools.product(
            (k for k in K_BLOCKS if k <= max(k_block // longer, 64)), range(ctas, 0, -1)
        ):
            choice = PortableChoice(token_tiles, row_warps, token_warps, row_blocks, k, c)
            # up to 32 tokens share a k block, the one that fits at the bound
            is_wide_enough = choice.tile(max(M, min(bound, 32)), K, card, layout) is not None
            if is_wide_enough and (tile := choice.tile(M, K, card, layout)):
                return tile
    raise AssertionError(f"no tile of {M} x {N} x {K} fits {card}")


def _forms(max_tokens: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield row_warps, token_warps, row_blocks, k_block, ctas_per_sm."""
    if max_tokens <= 32:
        yield from itertools.product((4,), (1,), (1, 2), (512, 256, 128), (1, 2, 3, 4))
        yield from itertools.product((8,), (1,), (1,), (512, 256, 128), (1, 2))
    else:
        yield from itertools.product((4,), (1,), (1, 2), (256, 128, 64), (1, 2, 3))
        yield from itertools.product((8,), (1,), (1, 2), (256, 128, 64), (1, 2))
        yield from itertools.product((4,), (2,), (1, 2), (256, 128, 64), (1, 2))
        yield from itertools.product((4,), (1, 2), (4,), (128, 64), (1, 2))
