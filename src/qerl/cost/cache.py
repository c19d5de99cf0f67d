"""The bytes of a decode cache: pages of keys and values, and slots of recurrent states."""

import math
from collections.abc import Sequence

import torch

from qerl.models.architecture import Architecture

FP8 = torch.float8_e4m3fn


def page_bytes(
    a: Architecture, page_tokens: int, dtype: torch.dtype, layers: Sequence[int] | None = None
) -> int:
    """Return the bytes of one page in these layers: keys, values and, in FP8, their scales. None: in all
    layers with attention, and the routes of a mixture."""
    routes = page_tokens * num_routes(a) if layers is None else 0
    each = (a.kv_heads(a.kind(i)) for i in (a.layers_with("attention") if layers is None else layers))
    token_bytes = sum(n * (size * dtype.itemsize + 4 * (dtype == FP8)) for n, size in each)
    return 2 * page_tokens * token_bytes + routes


def token_bytes(a: Architecture, kv_dtype: str) -> int:
    """Return the bytes of one token's keys and values, without scales: in fp8, else in bf16."""
    return 2 * a.kv_elements * (1 if kv_dtype == "fp8" else 2)


def slot_bytes(a: Architecture, compute: torch.dtype) -> int:
    """Return the bytes of a sequence's recurrent states; 0 if no layer has any."""
    shape = a.delta
    if shape is None:
        return 0
    each = math.prod(shape.conv_shape) * compute.itemsize + math.prod(shape.state_shape) * 4
    return each * len(a.layers_with("delta"))


def num_routes(a: Architecture) -> int:
    """Return the number of experts that a token goes through, over all layers."""
    return 0 if a.mixture is None else a.mixture.num_chosen * len(a.layers_with_experts)
