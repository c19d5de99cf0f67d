"""y = x @ W^T for few tokens and a weight in tiles, as nvfp4_decode.py has it, on any GPU since Ampere.

For NVFP4 the same tiles, factors, adapters and results; for the other formats of tile_layout.py each row's
factor is the format's alpha, and the values multiplied are those of its `operand` in bfloat16. An adapter's u
is given, or made in the same launch (portable_shrink.py). Sums run over k in an order that depends only on
the tile (portable_tile.py), so runs are bitwise equal.
"""

from collections.abc import Callable
from functools import partial

import torch

from qerl.kernels.runtime.architectures import architecture_of, gpu_of
from qerl.kernels.runtime.nvrtc import cached_method, compiled
from qerl.kernels.tiles.nvfp4_tile import TILE_ROWS
from qerl.kernels.tiles.packed_product import PackedProduct, slots_defines
from qerl.kernels.tiles.portable_shrink import AFTER_SHRINK, MAKES_U, MAX_ROWS, PortableShrink
from qerl.kernels.tiles.portable_table import choices_of, choose_portable_tile
from qerl.kernels.tiles.portable_tile import FILE, MAX_SUMS_PER_SM, NAME, PortableTile
from qerl.kernels.tiles.tile_layout import TileLayout

CASES = ((3584, 3584), (37888, 3584), (3584, 18944), (1152, 576))  # N, K


class PortableProduct(PackedProduct[PortableTile]):
    """The kernels of one device, compiled on first use, and their workspace. Use one object per stream.

    Two streams must not run them at the same time on one device: their CTAs wait for one another.
    """

    def __init__(
        self,
        device: torch.device,
        choose: Callable[[int, int, int], PortableTile] | None = None,
        layout: TileLayout = TileLayout.NVFP4,
    ):
        """choose: return a tile of this layout for (M, N, K), instead of the table's or the rule's."""
        name = torch.cuda.get_device_properties(gpu_of(device)).name
        settings = {"card": architecture_of(device), "choices": choices_of(name), "layout": layout}
        by_table = partial(choose_portable_tile, **settings)
        super().__init__(device, choose or by_table, MAX_SUMS_PER_SM, layout)
        self._shrink = PortableShrink(device)
        self._kernel = cached_method(self._compile)

    def computes_lora_hidden(self, M: int, N: int, K: int, rows: int) -> bool:
        """True if u of adapters with this many rows is faster made here than in a launch of its own."""
        tokens = self._choose(M, N, K).padded(M)
        return tokens <= MAX_ROWS and self._shrink.fits(tokens, K, rows)

    def _start(self, tile, grid, rank, swiglu, x_MK, tiles, adapter, epilogue) -> None:
        assert tile.layout is self._layout
        (m, k), n = x_MK.shape, TILE_ROWS * tiles.shape[0]
        by_adapter = AFTER_SHRINK if adapter is not None and adapter.follows_shrink else {}
        if adapter is not None and adapter.lora_hidden is None:
            by_adapter = MAKES_U
        by_adapter = by_adapter | slots_defines(adapter)
        low_rank = self._shrink.low_rank(adapter, tile.padded(m))
        self._kernel(tile, rank, swiglu, tuple(by_adapter.items())).launch(
            grid=grid,
            block_threads=tile.threads,
            parameters=(tiles, x_MK, epilogue, low_rank, self.workspace, m, n, k),
        )

    def _compile(self, tile: PortableTile, rank: int, swiglu: int, by_adapter: tuple[tuple[str, int], ...]):
        defines = tile.defines(rank, swiglu) | dict(by_adapter)
        return compiled(FILE, NAME, self._device, defines, shared_bytes=tile.shared_bytes)
