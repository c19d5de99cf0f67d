"""grouped_product.py on Hopper: the same products by `wgmma`, from rows that are sorted already.

Items of every size go through one loop whose sums run over k in one order, so that a row's bits depend
neither on the other rows of the step nor on the tile (tests/kernels/experts/test_grouped_product.py).
"""

import functools
from typing import Any

from torch import Tensor

from qerl.kernels.experts.grouped_product import GroupedProduct
from qerl.kernels.experts.moe_route import Routed
from qerl.kernels.runtime.architectures import ARCHITECTURES, SYSTEM_SHARED_BYTES
from qerl.kernels.runtime.nvrtc import compiled, tensor_map
from qerl.kernels.tiles.nvfp4_tile import Tile

FILE, NAME = "grouped_hopper.cu", "grouped_hopper"
_K_BLOCKS = (320, 256, 192, 128, 64)
_MIN_STAGES, _MAX_STAGES = 3, 8
_BOX_ROWS = 8  # of x


@functools.lru_cache(maxsize=256)
def hopper_tile(tokens: int, K: int) -> Tile:
    """Return the tile for items of up to this many rows: as wide in k as leaves three stages.

    Two warpgroups of one CTA were within 5 % of the best tiles of gpt-oss-20b and Qwen3-30B-A3B on an H100,
    at 8, 64 and 256 rows of a step; three have no registers left for an adapter's B."""
    tiles = (deepest(tokens, 2, k_block, 1) for k_block in _K_BLOCKS if K % k_block == 0)
    return next(tile for tile in tiles if tile.stages >= _MIN_STAGES)


def deepest(tokens: int, warpgroups: int, k_block: int, ctas_per_sm: int) -> Tile:
    """Return the tile with as many stages as there is room for."""
    card, one = ARCHITECTURES["sm_90a"], Tile(tokens, warpgroups, k_block, 1, ctas_per_sm)
    room = card.sm_shared_bytes // ctas_per_sm - SYSTEM_SHARED_BYTES
    stages = 1 + (room - one.shared_bytes) // (one.stage_bytes + 16)
    return Tile(tokens, warpgroups, k_block, min(stages, _MAX_STAGES), ctas_per_sm)


class HopperGroupedProduct(GroupedProduct):
    gathers = False

    def _start(self, x: Tensor, operands: bytes, n: int, routed: Routed, form: tuple) -> None:
        tile = hopper_tile(routed.item_rows, x.shape[1])
        parameters = tensor_map(x, _BOX_ROWS, tile.k_block) + operands
        self._kernel(tile, *form).launch(
            grid=min(len(routed.rows_S) * -(-n // tile.rows), self._num_sms * tile.ctas_per_sm),
            block_threads=tile.threads(has_adapter_warp=False),
            parameters=(parameters.ljust(-(-len(parameters) // 64) * 64, b"\0"),),
        )

    def _compile(self, tile: Any, swiglu: int, is_first: bool, rank: int, order: int):
        defines = defines_of(tile, swiglu, is_first, rank, order)
        return compiled(FILE, NAME, self._device, defines, shared_bytes=tile.shared_bytes)


def defines_of(tile: Tile, swiglu: int, is_first: bool, rank: int = 0, order: int = 0) -> dict[str, int]:
    """Return the constants of a product, from the arguments of grouped_product.defines_of. is_first: the plan
    may be from the previous kernel."""
    adapter = {"RANK": rank, "ORDER": order} if rank else {}
    return adapter | {
        "MT": tile.tokens,
        "WG": tile.warpgroups,
        "KB": tile.k_block,
        "STAGES": tile.stages,
        "CTAS": tile.ctas_per_sm,
        "SWIGLU": swiglu,
        "EARLY": int(not is_first),
        "GROUP_STRIDE": _BOX_ROWS * 2 * tile.k_block,
    }
