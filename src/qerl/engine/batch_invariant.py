"""Packed products in which the bits of a row do not depend on other rows: ONE_ORDER_ROWS rows at a time.

    y = product(x[0:32]), product(x[32:64]), ...        PackedLinears, slice by slice

More rows would be several tiles of tokens, and the SMs then split the k of each tile at another place: at
3584 x 3584, rows 0..31 and 32..63 of 64 differ in bits (tests/parity/test_exact_hopper.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qerl.engine.fused_linear import LinearGroup, PackedLinears

ONE_ORDER_ROWS = 32  # up to this many rows sums have one order: tests/kernels/test_nvfp4_decode.py


class BatchInvariantLinears:
    def __init__(self, device: torch.device):
        self._packed = PackedLinears(device)

    def makes_u(self, rows: int, group: LinearGroup) -> bool:
        return self._packed.makes_u(ONE_ORDER_ROWS, group)

    def linear(
        self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None, residual_BN: Tensor | None
    ) -> Tensor:
        return _by_slices(
            lambda x, u, residual: self._packed.linear(x, group, u, residual), x_BK, u_BR, residual_BN
        )

    def swiglu(self, x_BK: Tensor, group: LinearGroup, u_BR: Tensor | None) -> Tensor:
        return _by_slices(lambda x, u: self._packed.swiglu(x, group, u), x_BK, u_BR)


def _by_slices(product: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    starts = range(0, next(len(t) for t in tensors if t is not None), ONE_ORDER_ROWS)
    parts = [
        product(*(None if t is None else t[start : start + ONE_ORDER_ROWS] for t in tensors))
        for start in starts
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
