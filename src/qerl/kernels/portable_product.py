"""y = x @ W^T for few tokens and a weight in NVFP4 tiles, as nvfp4_decode.py has it, on any GPU since Ampere.

The same tiles, factors, adapters and results; only u of the adapter is always given (lora_shrink.py). Sums
run over k in an order that depends only on the tile (portable_tile.py), so runs are bitwise equal.
"""

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from qerl.kernels.architectures import CudaArchitecture, architecture_of
from qerl.kernels.cached_method import cached_method
from qerl.kernels.nvfp4_decode import PackedAdapter
from qerl.kernels.nvfp4_tile import MAX_TOKENS, MOST_TOKENS, TILE_BYTES, TILE_K, TILE_ROWS
from qerl.kernels.nvrtc import KernelVariant, addresses, compiled
from qerl.kernels.portable_table import choices_of, choose_portable_tile
from qerl.kernels.portable_tile import FILE, MOST_SUMS_PER_SM, NAME, PortableTile, rule

CASES = ((3584, 3584), (37888, 3584), (3584, 18944), (1152, 576))  # N, K
_NO_GROUP = 2**31 - 1


class PortableProduct:
    """The kernels of one device, compiled on first use, and their workspace. Use one object per stream.

    Two streams must not run them at the same time on one device: their CTAs wait for one another.
    """

    def __init__(self, device: torch.device, choose: Callable[[int, int, int], PortableTile] | None = None):
        """choose: return a tile for (M, N, K), instead of the table's or the rule's."""
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        card, measured = architecture_of(device), choices_of(properties.name)
        self._choose = choose or (lambda M, N, K: choose_portable_tile(M, N, K, card, measured))
        # -1 marks a word as not written; every launch leaves all words so
        self.workspace = torch.full((MOST_SUMS_PER_SM * self._num_sms,), -1, dtype=torch.int32, device=device)
        self._kernel = cached_method(self._compile)

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

        tiles of `nvfp4_decode.pack`, factors of `row_factors`, bias in fp32; an adapter with its u.
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
        self, x_MK: Tensor, tiles: Tensor, factors_N: Tensor, *, adapter: PackedAdapter | None = None
    ) -> Tensor:
        """Return silu(gate) * up [M, F] in bfloat16; tiles, factors and b are in `swiglu_order`."""
        features = TILE_ROWS // 2 * tiles.shape[0]
        y_MF = torch.empty(x_MK.shape[0], features, dtype=torch.bfloat16, device=x_MK.device)
        assert adapter is None or not adapter.starts
        self._launch(x_MK, tiles, factors_N, adapter, 2, None, None, y_MF, swiglu=1)
        return y_MF

    def _launch(self, x_MK, tiles, factors_N, adapter, groups, bias_N, residual_MN, y, *, swiglu) -> None:
        (m, k), n = x_MK.shape, TILE_ROWS * tiles.shape[0]
        assert x_MK.dtype == torch.bfloat16 and x_MK.is_contiguous() and x_MK.data_ptr() % 16 == 0
        assert tiles.shape == (n // TILE_ROWS, k // TILE_K, TILE_BYTES) and tiles.is_contiguous()
        assert 1 <= m <= MAX_TOKENS
        for rows in (factors_N, bias_N):
            assert rows is None or (
                rows.shape == (n,) and rows.dtype == torch.float32 and rows.is_contiguous()
            )
        rank, starts, u_MR = 0, (), None
        if adapter is not None:
            rank, starts, u_MR = adapter.b.shape[1], adapter.starts, adapter.u
            assert u_MR is not None and u_MR.shape == (m, groups * rank) and u_MR.dtype == torch.bfloat16
            assert u_MR.is_contiguous() and u_MR.data_ptr() % 16 == 0 and rank % 16 == 0
            assert adapter.b.shape == (n, rank) and adapter.b.dtype == torch.bfloat16
            assert adapter.b.is_contiguous() and len(starts) <= 2 and all(s % 16 == 0 for s in starts)
        tile = self._choose(m, n, k)
        grid = tile.grid(m, n, k, self._num_sms)
        assert tile.units(m, n, k) * grid < 2**32  # the kernel divides 32-bit numbers
        assert tile.workspace_words(self._num_sms) <= len(self.workspace)
        pointers = addresses(factors_N, bias_N, adapter and adapter.b, residual_MN, y)
        epilogue = struct.pack("5Q4i", *pointers, m, n, *(*starts, _NO_GROUP, _NO_GROUP)[:2])
        self._kernel(tile, rank, swiglu).launch(
            grid=grid,
            block_threads=tile.threads,
            parameters=(tiles, x_MK, epilogue, u_MR, self.workspace, m, n, k),
        )

    def _compile(self, tile: PortableTile, rank: int, swiglu: int):
        defines = tile.defines(rank, swiglu)
        return compiled(
            FILE,
            NAME,
            self._device,
            defines,
            shared_bytes=tile.shared_bytes,
        )


def variants(card: CudaArchitecture) -> list[KernelVariant]:
    """Return what is launched by rule for the sizes of CASES on a card of this architecture."""
    each = {
        rule(most, N, K, card).variant(rank, swiglu): None
        for most in MOST_TOKENS
        for N, K in CASES
        for rank, swiglu in ((32, 0), (32, 1), *(((0, 0),) if most == MAX_TOKENS else ()))
    }
    return list(each)
