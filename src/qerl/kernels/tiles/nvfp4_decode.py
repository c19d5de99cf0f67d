"""y = x @ W^T for few tokens and a weight in NVFP4, with LoRA, bias and what follows in the epilogue.

    u_MR = scaling * x_MK @ a_RK^T                                      rounded to bfloat16
    y_MN = alpha_N * (x_MK @ (codes * scales)_NK^T) + u_MR @ b_NR^T + bias_N + residual_MN
    y_MF = silu(gate_MF) * up_MF         where [gate, up] is such a y with N = 2 F; or gelu, or its tanh form

M tokens (1 to 256), N output and K input features (multiples of 64), R the adapter's rank; alpha is fp32,
one number per row. u is computed in the same launch (nvfp4_shrink.cuh) and waited for only where it is
added; for large weights one warp of each CTA copies it to shared memory (nvfp4_shared_u.cuh). y is rounded
to bfloat16; with a residual, which is fp32, y is fp32 too.

Layout, exactly invertible, the same for every M:

    tiles   uint8 [N / 64, K / 64, 2304]   64 rows x 64 k: 4 warps' codes (512 bytes each), then scales (64)
    codes   int32 [4 warps, 8 g, 4 t, 4 j]           rows 16 warp + g and + 8, k = 16 j + 2 t + {0, 1, 8, 9}
    scales  int32 [4 warps, 8 g, 2]                  the same rows; blocks j = 0, 1 and j = 2, 3

This is the order of the first operand of wgmma and mma.sync. From a word w of codes, eight operations move
four pairs (k, k + 1) to a bfloat16's sign, low exponent and high mantissa bits, with m = 0x81C081C0:

    row g, k        w & m           row g, k + 8        (w rotated right by 4) & m
    row g + 8, k    (w << 6) & m    row g + 8, k + 8    ((w << 2) ^ (w >> 6)) & m

So a code of value c becomes c * 2^-126. A scale has an exponent of 5 bits and a mantissa of 3, every
positive E4M3 number exactly: as bfloat16 bits it is s * 2^107. The product c * s * 2^-19 is exact and never
subnormal; 2^19 is folded into alpha. A scale of 0 has no such form, so its codes become 0: the only thing
that unpack does not restore.

Sums run over k in an order that depends only on the tile (nvfp4_tile.py): runs are bitwise equal, and a row
is bitwise equal at every M up to 32 (tests/kernels/tiles/test_nvfp4_decode.py).
"""

import struct
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qerl.formats import e2m1
from qerl.kernels.runtime.architectures import gpu_of
from qerl.kernels.runtime.nvrtc import addresses, cached_method, compiled, tensor_map
from qerl.kernels.tiles.nvfp4_tile import MAX_TOKENS, TILE_BYTES, TILE_K, TILE_ROWS, Tile, choose_tile
from qerl.kernels.tiles.packed_product import PackedAdapter, PackedProduct, gate_defines

CASES = ((1, 64, 64, 0), (8, 192, 576, 16), (17, 3584, 1024, 32), (33, 640, 3584, 64), (100, 1152, 896, 128))
MAX_LOW_RANK_ROWS = 384  # of all adapters that read one x
ALPHA_FACTOR = 2.0**19

_PLACED = 0x81C081C0  # the bits of two codes in two bfloat16
_LARGE_WEIGHT = 2**26  # gate|up and down of 7B, o of 72B; q|k|v and o of 7B and 32B are smaller
_PARTIAL_WORDS = 2**23  # of u's sums: of each number of u at most K / TILE_K
_WORKSPACE_WORDS = 2 * 128 * 256  # per multiprocessor: two slots for the largest tile
_U_WORDS = MAX_TOKENS * MAX_LOW_RANK_ROWS // 2


def reference(
    x_MK: Tensor,
    codes: Tensor,
    scales: Tensor,
    alpha_N: Tensor,
    u_MR: Tensor | None = None,
    b_NR: Tensor | None = None,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
) -> Tensor:
    """The first definition above in float64, from plain codes and scales; one adapter for all rows."""
    weight_NK = e2m1.decode(codes, torch.float32).double() * scales.double().repeat_interleave(16, dim=1)
    y_MN = (x_MK.double() @ weight_NK.T) * alpha_N.double()
    if u_MR is not None and b_NR is not None:
        y_MN = y_MN + u_MR.double() @ b_NR.double().T
    for term in (bias_N, residual_MN):
        y_MN = y_MN if term is None else y_MN + term.double()
    return y_MN


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return tiles of codes uint8 [N, K / 2] (low nibble: even k), scales float8_e4m3fn [N, K / 16] >= 0."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
    assert n % TILE_ROWS == k % TILE_K == 0 and scales.shape == (n, k // 16)
    used = (scales.float() != 0).repeat_interleave(16, dim=1)
    each = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1) * used
    # rows: n64, warp, row half, g; k: k64, j, k half, t, pair
    each = each.view(n // 64, 4, 2, 8, k // 64, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 6, 2, 8)
    words = _packed_codes(each.flatten(6, 7))
    return torch.cat((words.flatten(2), _packed_scales(scales).flatten(2)), dim=-1).view(torch.uint8)


def unpack(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) as given to `pack`."""
    assert tiles.dtype == torch.uint8 and tiles.dim() == 3 and tiles.shape[2] == TILE_BYTES
    rows, columns = tiles.shape[0], tiles.shape[1]
    words = tiles.view(torch.int32)[..., :512].view(rows, columns, 4, 8, 4, 4)
    each = _unpacked_codes(words).unflatten(-2, (2, 2))
    each = each.permute(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(rows * 64, columns * 32, 2)
    return each[..., 0] | (each[..., 1] << 4), _unpacked_scales(tiles.view(torch.int32)[..., 512:])


def row_factors(alpha: Tensor, rows: int) -> Tensor:
    """Return fp32 [N] = alpha * 2^19, as the kernel expects; alpha is one number or one per row."""
    return (alpha.float() * ALPHA_FACTOR).expand(rows).contiguous()


def swiglu_order(features: int, device: torch.device) -> Tensor:
    """Return order: row i of a weight packed for `swiglu` is row order[i] of [gate, up], 8 of each."""
    assert features % 32 == 0
    gate = torch.arange(features, device=device).view(-1, 8)
    return torch.cat((gate, gate + features), dim=1).flatten()


def pays_to_compute_lora_hidden(M: int, K: int, rows: int, swiglu: bool) -> bool:
    """True if computing u here is faster than in lora_shrink.py: launches on an H200 (dev/log/adapters.md).

    rows: of all adapters that read x, whose sums must fit; swiglu: the weight is gate and up.
    """
    max_words = K // TILE_K * rows * (-(-M // 64) * 64)  # tokens of whole tiles, rounded up
    return max_words <= _PARTIAL_WORDS and (M <= 96 or not swiglu)


def pays_to_share_lora_hidden(M: int, weight_NK: int, swiglu: bool) -> bool:
    """True if u in shared memory is faster than u loaded by each warp (H200, dev/log/adapters.md).

    weight_NK: number of elements of the weight; swiglu: it is gate and up. A row's bits are the same.
    """
    return weight_NK >= _LARGE_WEIGHT and (M > 64 or (swiglu and M > 32))


def shared_u_bytes(tile: Tile, M: int, columns: int) -> int:
    """Return the bytes of shared memory for u, bfloat16 [tokens of whole tiles, columns]."""
    return 2 * columns * tile.padded_tokens(M)


class NVFP4Decode(PackedProduct[Tile]):
    """The kernels of one device, compiled on first use, and their workspace. Use one object per stream.

    Two streams must not run them at the same time on one device: their CTAs wait for one another
    (`Tile.splits_sums`), so all of them must be resident.
    """

    def __init__(
        self,
        device: torch.device,
        choose: Callable[[int, int, int], Tile] | None = None,
        shares_lora_hidden: Callable[[int, int, bool], bool] = pays_to_share_lora_hidden,
    ):
        """choose: return a tile for (M, N, K), instead of the table. shares_lora_hidden: return True for
        (M, N K, swiglu) to keep u in shared memory; where that leaves fewer than two stages, each warp loads
        u itself."""
        name = torch.cuda.get_device_properties(gpu_of(device)).name
        super().__init__(device, choose or partial(choose_tile, gpu=name), _WORKSPACE_WORDS)
        self._shares_lora_hidden = shares_lora_hidden
        self.partials = torch.full((_PARTIAL_WORDS,), -1, dtype=torch.int32, device=device)
        self._u = torch.full((2, _U_WORDS), -1, dtype=torch.int32, device=device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)
        self._kernel = cached_method(self._compile)

    def _start(self, tile, grid, rank, swiglu, x_MK, tiles, adapter, epilogue) -> None:
        (m, k), n = x_MK.shape, TILE_ROWS * tiles.shape[0]
        split = tile.splits_sums(m, n, k, self._num_sms)
        computes_lora_hidden = adapter is not None and adapter.lora_hidden is None
        u_bytes, beside = 0, None
        has_slots = adapter is not None and adapter.slots is not None
        if adapter is not None and not has_slots and self._shares_lora_hidden(m, n * k, swiglu > 0):
            u_bytes = shared_u_bytes(tile, m, len(adapter.a))
            beside = tile.with_room_for(u_bytes)
        tile, u_bytes = (tile, 0) if beside is None else (beside, u_bytes)
        given_u = int(rank > 0 and not computes_lora_hidden)
        kernel = self._kernel(tile, rank, swiglu, int(split), given_u, u_bytes, has_slots)
        kernel.launch(
            grid=grid,
            block_threads=tile.threads(computes_lora_hidden or u_bytes > 0),
            parameters=(
                tiles,
                tensor_map(x_MK, tile.tokens, tile.k_block),
                epilogue,
                self._low_rank(tile, m, k, adapter),
                self.workspace,
                m,
                n,
                k,
            ),
        )

    def _low_rank(self, tile: Tile, M: int, K: int, adapter: PackedAdapter | None) -> bytes:
        if adapter is None:
            return bytes(40)
        if adapter.lora_hidden is not None:
            return struct.pack("4Qfi", 0, 0, adapter.lora_hidden.data_ptr(), 0, 0.0, 0)
        rows, tokens = len(adapter.a), tile.padded_tokens(M)
        assert rows <= MAX_LOW_RANK_ROWS and tokens <= MAX_TOKENS and adapter.a.data_ptr() % 16 == 0
        assert K // tile.slice_k * tokens * rows <= len(self.partials)
        pointers = addresses(adapter.a, self.partials, self._u, self._turns)
        return struct.pack("4Qfi", *pointers, adapter.scaling, rows)

    def _compile(
        self, tile: Tile, rank: int, swiglu: int, split: int, given_u: int, u_bytes: int, has_slots: bool
    ):
        defines = {
            "MT": tile.tokens,
            "WG": tile.warpgroups,
            "KB": tile.k_block,
            "STAGES": tile.stages,
            "CTAS": tile.ctas_per_sm,
            "GROUP": 4 if tile.k_block % 128 == 0 else 2,
            "RANK": rank,
            **gate_defines(swiglu),
            "SPLIT": split,
            "U_WORDS": _U_WORDS,
            "GIVEN_U": given_u,
            "U_BYTES": u_bytes,
        } | ({"SLOTS": 1} if has_slots else {})
        shared_bytes = tile.shared_bytes + u_bytes
        return compiled("nvfp4_decode.cu", "nvfp4_decode", self._device, defines, shared_bytes=shared_bytes)


def _packed_codes(each: Tensor) -> Tensor:
    """Pack uint8 [..., 4, 2] (rows g, g + 8 at k, then at k + 8; k and k + 1) into int32 [...]."""
    both = each[..., 0].long() | (each[..., 1].long() << 16)
    placed = ((both & 0x00080008) << 12) | ((both & 0x00070007) << 6)
    first, second, third, fourth = placed.unbind(-1)
    words = first | (second >> 6) | ((third << 4) & 0xFFFFFFFF) | (third >> 28)
    rest = fourth ^ (((words << 2) ^ (words >> 6)) & _PLACED)  # what the eight free bits must add
    chain = rest & 0x80808080  # a bit set for one of these also counts 8 places below
    chain = chain ^ (chain >> 8)
    chain = chain ^ (chain >> 16)
    words = words | ((chain | (rest & 0x00400040)) >> 2) | ((rest & 0x01000100) << 6)
    return words.int()


def _unpacked_codes(words: Tensor) -> Tensor:
    """Invert `_packed_codes` with the bit operations of the kernels."""
    turned = ((words >> 4) & 0x0FFFFFFF) | (words << 28)
    mixed = (words << 2) ^ ((words >> 6) & 0x03FFFFFF)
    placed = torch.stack((words, words << 6, turned, mixed), dim=-1)
    both = ((placed >> 12) & 0x00080008) | ((placed >> 6) & 0x00070007)
    return both.view(torch.uint8).unflatten(-1, (4, 4))[..., ::2]


def _packed_scales(scales: Tensor) -> Tensor:
    """Return int32 [N / 64, K / 64, 4, 8, 2]: even blocks in bits 11..4 of both halves, odd rotated by 8."""
    (n, blocks), value = scales.shape, scales.float()
    mantissa, exponent = torch.frexp(value)  # value = mantissa * 2^exponent, mantissa from 1/2
    byte = ((exponent + 9) * 8 + ((2 * mantissa - 1) * 8).int()) * (value > 0)
    # rows: n64, warp, row half, g; blocks: k64, word, parity
    byte = byte.view(n // 64, 4, 2, 8, blocks // 4, 2, 2).permute(0, 4, 1, 3, 5, 6, 2).int()
    even0, even1, odd0, odd1 = byte[..., 0, 0], byte[..., 0, 1], byte[..., 1, 0], byte[..., 1, 1]
    odd = (odd0 >> 4) | ((odd0 & 15) << 28) | ((odd1 >> 4) << 16) | ((odd1 & 15) << 12)
    return (even0 << 4) | (even1 << 20) | odd


def _unpacked_scales(words: Tensor) -> Tensor:
    """Invert `_packed_scales` for int32 [N / 64, K / 64, 64]."""
    rows, columns = words.shape[:2]
    words = words.reshape(rows, columns, 4, 8, 2)
    even = torch.stack((words >> 4, words >> 20), dim=-1) & 255
    odd0 = ((words & 15) << 4) | ((words >> 28) & 15)
    odd1 = (((words >> 16) & 15) << 4) | ((words >> 12) & 15)
    byte = torch.stack(
        (even, torch.stack((odd0, odd1), dim=-1)), dim=-2
    )  # n64, k64, warp, g, word, parity, row half
    byte = byte.permute(0, 2, 6, 3, 1, 4, 5).reshape(rows * 64, columns * 4)
    value = torch.ldexp(1 + (byte & 7) / 8, (byte >> 3) - 10) * (byte > 0)
    return value.to(torch.float8_e4m3fn)
