"""A gradient in another dtype, which the kernel that computed it may have written already.

The residual stream's gradient is fp32, and the product before a norm reads it in bfloat16. That product
requests it (`request_dtype`) when it returns its result, and the norm's backward kernel then writes both: a
cast would read the gradient once more.
"""

import torch
from torch import Tensor

_REQUESTED, _ROUNDED = "_qerl_requested_dtype", "_qerl_rounded"


def request_dtype(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result, whose gradient is read by `in_dtype` in this dtype."""
    setattr(result, _REQUESTED, dtype)
    return result


def has_requested_dtype(x: Tensor, dtype: torch.dtype) -> bool:
    """True if who made x requested its gradient in this dtype."""
    return vars(x).get(_REQUESTED) == dtype


def attach_rounded(gradient: Tensor, rounded: Tensor) -> None:
    """Attach `rounded` to the gradient, until it is read or the gradient is freed."""
    assert rounded.shape == gradient.shape
    setattr(gradient, _ROUNDED, (gradient._version, rounded))


def in_dtype(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient in this dtype: what was attached to it unless it was changed since, else a cast."""
    version, rounded = vars(gradient).pop(_ROUNDED, (None, None))
    if rounded is not None and rounded.dtype == dtype and version == gradient._version:
        return rounded
    return gradient.to(dtype)
