"""List the kernels of products whose tiles follow from the card alone: packed weights, experts, DeltaNet."""

from qerl.kernels.delta_net import gated_delta_chunks
from qerl.kernels.experts import grouped_hopper, grouped_product
from qerl.kernels.experts.grouped_product import CASES, ITEM_ROWS
from qerl.kernels.runtime.architectures import CudaArchitecture
from qerl.kernels.runtime.nvrtc import KernelVariant
from qerl.kernels.tiles import portable_product
from qerl.kernels.tiles.nvfp4_tile import MAX_TOKENS, TOKEN_BOUNDS
from qerl.kernels.tiles.portable_shrink import AFTER_SHRINK, MAKES_U
from qerl.kernels.tiles.portable_tile import rule
from qerl.kernels.tiles.tile_layout import TileLayout


def portable_variants(card: CudaArchitecture) -> list[KernelVariant]:
    """Return what the portable product launches by rule for the sizes of its CASES."""
    each = {
        rule(bound, N, K, card, layout).variant(rank, swiglu, extra): None
        for layout in TileLayout
        for bound in TOKEN_BOUNDS
        for N, K in portable_product.CASES
        for rank, swiglu in ((32, 0), (32, 1), *(((0, 0),) if bound == MAX_TOKENS else ()))
        for extra in (({}, AFTER_SHRINK, MAKES_U) if rank else ({},))
    }
    return list(each)


def grouped_variants(card: CudaArchitecture) -> list[KernelVariant]:
    """Return what the products of experts launch for the sizes of their CASES; the plain SwiGLU, which
    differs from the clamped one by a line, for one of them, and adapters for the smallest and largest."""
    op = grouped_product
    tiles = list(dict.fromkeys(op.grouped_tile(tokens, N, K, card) for tokens in ITEM_ROWS for N, K in CASES))
    forms = [(tile, *form) for tile in tiles for form in ((0, False), (2, True))] + [(tiles[0], 1, True)]
    adapters = ((0, False, 4, 0), (0, False, 16, 0), (2, True, 4, 2), (1, True, 16, 1))
    forms += [(tile, *form) for tile in (tiles[0], tiles[-1]) for form in adapters]
    each = [
        (tile, _pairs(op.defines_of(tile, activation, bool(gather), *rank)))
        for tile, activation, gather, *rank in forms
    ]
    shrinks = [
        KernelVariant(op.SHRINK_FILE, op.SHRINK_NAME, (("GATHER", gather), ("RANK", rank)), 256, 0)
        for gather, rank in ((1, 4), (0, 16))
    ]
    return [KernelVariant(op.FILE, op.NAME, pairs, t.threads, t.shared_bytes) for t, pairs in each] + shrinks


def hopper_variants() -> list[KernelVariant]:
    """Return what Hopper launches for the same sizes, and adapters for the smallest and largest items."""
    op, forms = grouped_hopper, ((0, False), (2, True), (0, False, 16, 0), (2, True, 4, 2))
    each = {
        (op.hopper_tile(tokens, K), form)
        for tokens in ITEM_ROWS
        for _, K in CASES
        for form in forms
        if len(form) == 2 or tokens in (ITEM_ROWS[0], ITEM_ROWS[-1])
    }
    return [
        KernelVariant(
            op.FILE,
            op.NAME,
            _pairs(op.defines_of(tile, *form)),
            tile.threads(has_adapter_warp=False),
            tile.shared_bytes,
        )
        for tile, form in each
    ]


def delta_chunks_variant(card: CudaArchitecture) -> KernelVariant:
    """Return the kernel of Gated DeltaNet's chunks that the card launches."""
    op = gated_delta_chunks
    return KernelVariant(op.FILE, op.NAME, (("CTAS", op.max_ctas(card)),), 128, op.SHARED_BYTES)


def _pairs(defines: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(defines.items()))
