"""A gradient in another dtype, which the kernel that computed it may have written already.

The residual stream's gradient is fp32, and the product before a norm reads it in bfloat16. That product asks
for it (`ask`) when it returns its result, and the norm's backward kernel then writes both: a cast would read
the gradient once more.
"""

import torch
from torch import Tensor

_ASKED, _KEPT = "_qerl_asked", "_qerl_rounded"


def ask(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result, whose gradient is read by `in_dtype` in this dtype."""
    setattr(result, _ASKED, dtype)
    return result


def is_asked(x: Tensor, dtype: torch.dtype) -> bool:
    """True if who made x asked for its gradient in this dtype."""
    return vars(x).get(_ASKED) == dtype


def keep(gradient: Tensor, rounded: Tensor) -> None:
    """Keep `rounded` with the gradient, until it is taken or the gradient is freed."""
    assert rounded.shape == gradient.shape
    setattr(gradient, _KEPT, (gradient._version, rounded))


def in_dtype(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient in this dtype: what was kept with it, unless it was changed since, else a cast."""
    version, rounded = vars(gradient).pop(_KEPT, (None, None))
    if rounded is not None and rounded.dtype == dtype and version == gradient._version:
        return rounded
    return gradient.to(dtype)
