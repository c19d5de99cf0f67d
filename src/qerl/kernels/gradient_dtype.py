"""A gradient in another dtype, which the kernel that computed it may have written already.

The residual stream's gradient is fp32, and the products before it read it in bfloat16: the norm's backward
kernel writes both, since a cast would read the gradient once more.
"""

import torch
from torch import Tensor

_KEPT = "_qerl_rounded"


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
