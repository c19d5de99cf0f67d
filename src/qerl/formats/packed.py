"""The interface of all formats, and what their encoders share: checks, row chunks, lookup of code pairs.

    y = alpha * (x @ operand.T)        decode() = operand(float32) * alpha

An instance is immutable and represents one weight [N, K], N outputs and K inputs. Encoding is computed in
float32, rounds to nearest even and saturates. The bits are the same on every device, except for NF4's mean
(nf4.py). Divisors are tensors, never Python numbers: for a number, torch on CUDA multiplies by its rounded
reciprocal.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from torch import Tensor

from qerl.errors import UserError

# Temporaries of 1 MiB fit a CPU core's cache: NVFP4 encodes [4736, 3584] in 61 ms, with 16 MiB in 138 ms.
_CPU_CHUNK_WEIGHTS = 1 << 18
# On a GPU few launches and little extra memory matter: a temporary has at most 64 MiB.
_GPU_CHUNK_WEIGHTS = 1 << 24


class PackedWeight(Protocol):
    """One weight [N, K] in some format: NVFP4.encode(weight_NK).decode() approximates weight_NK."""

    name: ClassVar[str]
    bytes_per_weight: ClassVar[float]
    """Includes scales, but nothing whose size depends on N or K alone."""

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        """Encode any floating dtype. Raise UserError if the shape does not fit or a weight is not finite."""
        ...

    def operand(self, dtype: torch.dtype) -> Tensor:
        """Return the operand [N, K] of the product in bfloat16, float32 or, if its range allows, float16."""
        ...

    @functools.cached_property
    def alpha(self) -> Tensor:
        """Multiplier of the product, float32: a scalar [], or [N], one per output."""
        return torch.ones((), device=next(iter(self.tensors().values())).device)

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the first tensor's codes; a byte of uint8 holds two of them."""
        codes = next(iter(self.tensors().values()))
        return codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)

    def decode(self) -> Tensor:
        """Return the weight that the codes represent, float32 [N, K]."""
        return self.operand(torch.float32).mul_(self.alpha.reshape(-1, 1))

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(cast(Any, self))}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> Self:
        moved: Any = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return type(self)(**moved)


def largest_magnitude(weight_NK: Tensor, name: str, block_weights: int) -> Tensor:
    """Return max |w| as a float32 scalar. Raise UserError if format `name` cannot store this weight."""
    assert weight_NK.is_floating_point()
    shape = list(weight_NK.shape)
    if len(shape) != 2 or weight_NK.numel() == 0:
        raise UserError(f"{name}: the weight must be two-dimensional and not empty, got shape {shape}")
    if shape[1] % block_weights:
        raise UserError(f"{name}: K must be a multiple of {block_weights}, got a weight of shape {shape}")
    ends = [torch.stack(torch.aminmax(weight_NK[rows].float())) for rows in row_chunks(weight_NK)]
    largest = torch.stack(ends).abs().max()
    if not largest.isfinite():
        raise UserError(f"{name}: weights must be finite, got NaN or infinity in a weight of shape {shape}")
    return largest


def row_chunks(weight_NK: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Return slices over the rows, each of bounded size and starting at a multiple of `multiple`."""
    num_rows, row_weights = weight_NK.shape
    limit = _CPU_CHUNK_WEIGHTS if weight_NK.device.type == "cpu" else _GPU_CHUNK_WEIGHTS
    step = max(limit // row_weights // multiple, 1) * multiple
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def look_up_pairs(codes_NB: Tensor, pairs_C2: Tensor) -> Tensor:
    """Return two values per byte, [N, 2B]; each pair is gathered as a single number of twice the size."""
    pair_dtype = torch.int64 if pairs_C2.element_size() == 4 else torch.int32
    values = pairs_C2.view(pair_dtype).flatten().index_select(0, codes_NB.flatten().int())
    return values.view(pairs_C2.dtype).view(codes_NB.shape[0], -1)
