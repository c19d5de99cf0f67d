"""A packed product of the decode step with random weights, to be timed with different tiles."""

import dataclasses
from collections.abc import Callable

import torch

from qerl.bench.timing import graph_times
from qerl.kernels.tiles.nvfp4_decode import NVFP4Decode, PackedAdapter, pack
from qerl.kernels.tiles.nvfp4_tile import TOKEN_BOUNDS
from qerl.kernels.tiles.portable_product import PortableProduct
from qerl.models.layer_spec import LinearGroupSpec

_WEIGHT_BYTES = 4e8
"""Bytes of all copies of a weight: at least four times the L2 cache of any GPU."""


def timed_batches(max_tokens: int) -> tuple[int, ...]:
    """Return the batches at which a choice of tiles is timed; one serves all of up to TOKEN_BOUNDS[0]."""
    return (8, max_tokens) if max_tokens == TOKEN_BOUNDS[0] else (max_tokens,)


class Product:
    """One of q|k|v, o, gate|up, down, with as many copies of its weights as exceed the L2 cache.

    It has adapter, bias, residual and SwiGLU as a decode step launches it.
    """

    def __init__(self, gemm: LinearGroupSpec, rank: int, device: torch.device):
        """rank: of the adapter; 0 is none."""
        self.gemm, self._device = gemm, device
        N, K = gemm.out_width, gemm.in_width
        one = pack(torch.full((64, 32), 0x3A, dtype=torch.uint8), torch.ones(64, 4).to(torch.float8_e4m3fn))
        copies = max(2, int(_WEIGHT_BYTES / (N * K * 0.5625)))
        tiles = one.to(device).expand(N // 64, K // 64, -1)
        self._copies = [tiles.contiguous() for _ in range(copies)]
        self._factors_N = torch.full((N,), 1e-3, device=device)
        self._bias_N = torch.zeros(N, device=device) if gemm.name == "qkv" else None
        groups = len(gemm.out_widths)
        starts = tuple(torch.tensor(gemm.out_widths).cumsum(0).tolist()[:-1]) if gemm.name == "qkv" else ()
        a, b = (torch.zeros(shape, device=device).bfloat16() for shape in ((groups * rank, K), (N, rank)))
        self._adapter = PackedAdapter(a, b, 1.0, starts) if rank else None

    def launch_us(
        self, kernels: NVFP4Decode | PortableProduct, M: int, runs: int, *, gives_hidden: bool
    ) -> float:
        """Return the median time of a launch for M tokens, in a CUDA graph of launches with other weights.

        gives_hidden: the adapter's hidden values are computed before, else by the product.
        """
        times = graph_times(self.work(kernels, M, gives_hidden=gives_hidden), runs)
        return 1e3 * times.ms / len(self._copies)

    def work(
        self, kernels: NVFP4Decode | PortableProduct, M: int, *, gives_hidden: bool
    ) -> Callable[[], None]:
        """Return a function that launches the product once for each copy of its weights."""
        x_MK = torch.randn(M, self.gemm.in_width, device=self._device).bfloat16()
        adapter = self._adapter
        if adapter is not None and gives_hidden:
            adapter = dataclasses.replace(adapter, lora_hidden=x_MK.new_zeros(M, len(adapter.a)))
        has_residual = self.gemm.name in ("o", "down")
        residual_MN = torch.zeros(M, self.gemm.out_width, device=self._device) if has_residual else None

        def run() -> None:
            for tiles in self._copies:
                if self.gemm.name == "gate_up":
                    kernels.swiglu(x_MK, tiles, self._factors_N, adapter=adapter)
                else:
                    rest = {"bias_N": self._bias_N, "residual_MN": residual_MN}
                    kernels.linear(x_MK, tiles, self._factors_N, adapter=adapter, **rest)

        return run
