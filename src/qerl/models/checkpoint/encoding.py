"""Encode a checkpoint's float weights, tensor by tensor.

NVFP4 linears that read the same input (q, k, v; gate, up) share one global scale: vLLM fuses them and keeps
only the largest of their scales, which would distort the others. Loading and writing share scales alike, so
both have the same linears, bit for bit.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from qerl.errors import naming
from qerl.formats import NVFP4, PackedWeight
from qerl.formats.block_scale import least_squares
from qerl.models.checkpoint.source import Checkpoint
from qerl.models.checkpoint.state_dict import read_float

_GROUP_BYTES = 256 << 20
"""float32 weights of a group in a GPU's memory: gate and up of a 3B model have 180 MB."""


class SelectScales(Protocol):
    """Function (default encoding, weight) -> encoding with the chosen block scales."""

    def __call__(
        self, packed: PackedWeight, weight_NK: Tensor, importance_K: Tensor | None = None
    ) -> PackedWeight:
        """importance_K: factor of an input's squared errors; None: all count alike."""
        ...


def default_scales(
    packed: PackedWeight, weight_NK: Tensor, importance_K: Tensor | None = None
) -> PackedWeight:
    """Keep the scales of `encode`: each block's largest weight maps to the largest code."""
    return packed


SCALES: dict[str, SelectScales] = {"plain": default_scales, "mse": least_squares}
"""By the names of model.scales."""


def encode_group(
    checkpoint: Checkpoint,
    group: tuple[str, ...],
    kind: type[PackedWeight],
    device: torch.device,
    scales: SelectScales = default_scales,
) -> Iterator[tuple[str, PackedWeight]]:
    """Yield a group's linears with their encoded weights. One float weight is in memory at a time, or all
    of them if they are small and a GPU encodes them: their shared scale else takes a second reading."""
    names = [f"{linear}.weight" for linear in group]
    num_bytes = 4 * sum(math.prod(checkpoint.shapes[name]) for name in names)
    has_shared_scale = kind is NVFP4 and len(group) > 1
    holds_group = has_shared_scale and device.type != "cpu" and num_bytes <= _GROUP_BYTES
    group_weights = {name: read_float(checkpoint, name).to(device) for name in names} if holds_group else {}
    weights = (group_weights[name] if holds_group else read_float(checkpoint, name) for name in names)
    largest = _shared_largest(weights, kind, len(group))

    def encoded(name: str) -> PackedWeight:
        weight_NK = group_weights.pop(name) if holds_group else read_float(checkpoint, name).to(device)
        with naming(f"{checkpoint.path}: {name}"):
            return encode_weight(weight_NK, kind, scales, largest)

    for linear in group:
        yield linear, encoded(f"{linear}.weight")


def encode_weight(
    weight_NK: Tensor, kind: type[PackedWeight], scales: SelectScales, largest: float | None = None
) -> PackedWeight:
    """Encode one weight. largest: the magnitude that sets its global scale; None: its own."""
    packed = kind.encode(weight_NK) if largest is None else NVFP4.encode(weight_NK, largest)
    return scales(packed, weight_NK)


def encode_weights(
    weights: list[Tensor], kind: type[PackedWeight], scales: SelectScales = default_scales
) -> list[PackedWeight]:
    """Encode a group's weights that are in memory, as `encode_group` does."""
    largest = _shared_largest(iter(weights), kind, len(weights))
    return [encode_weight(weight_NK, kind, scales, largest) for weight_NK in weights]


def _shared_largest(weights: Iterator[Tensor], kind: type[PackedWeight], num: int) -> float | None:
    """Return the magnitude that sets the group's global scale; None if each linear has its own scale."""
    return max(map(_largest, weights)) if kind is NVFP4 and num > 1 else None


def _largest(weight_NK: Tensor) -> float:
    """Return the largest magnitude without the copy that abs() makes."""
    return torch.stack(torch.aminmax(weight_NK)).abs().max().item()
