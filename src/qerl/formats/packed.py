"""What every format promises, and what encoding one shares: checks, row chunks, looking up two codes a byte.

    y = alpha * (x @ operand.T)        decode() = operand(float32) * alpha

A format is a frozen value that stands for one weight [N, K], N outputs and K inputs. Encoding is computed in
float32, rounds to nearest even and saturates; every device gives the same bits but for NF4's mean (nf4.py).
Division is by tensors, never by Python numbers: torch on CUDA multiplies by a number's rounded reciprocal.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from qerl.errors import UserError

# A CPU core keeps 1 MiB temporaries in its cache: NVFP4 encodes [4736, 3584] in 61 ms, at 16 MiB in 138 ms.
_CPU_CHUNK_WEIGHTS = 1 << 18
# A GPU wants few launches and little memory beside the weight: at most 64 MiB for a temporary.
_GPU_CHUNK_WEIGHTS = 1 << 24


class PackedWeight(Protocol):
    """One weight [N, K] in some format: NVFP4.encode(weight_NK).decode() is near weight_NK."""

    name: ClassVar[str]
    bytes_per_weight: ClassVar[float]
    """Scales included; what depends on N or K alone is not."""
    alpha: Tensor
    """What the product is multiplied by, float32: [] or, one for each output, [N]."""

    @classmethod
    def encode(cls, weight_NK: Tensor) -> Self:
        """From any floating dtype; UserError if the shape does not fit or a weight is not finite."""
        ...

    def operand(self, dtype: torch.dtype) -> Tensor:
        """What is multiplied, [N, K], in bfloat16 or float32; in float16 if the numbers are in its range."""
        ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def decode(self) -> Tensor:
        """The weight that the codes stand for, float32 [N, K]."""
        return self.operand(torch.float32).mul_(self.alpha.reshape(-1, 1))

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _stored(self)}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> Self:
        moved: Any = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return type(self)(**moved)


def _stored(weight: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(weight) if field.init]


def largest_magnitude(weight_NK: Tensor, name: str, block_weights: int) -> Tensor:
    """max |w| as a float32 scalar; UserError where `name` cannot hold this weight in blocks along K."""
    assert weight_NK.is_floating_point()
    shape = list(weight_NK.shape)
    if len(shape) != 2 or weight_NK.numel() == 0:
        raise UserError(f"{name} holds a weight of two dimensions with something in it, got {shape}")
    if shape[1] % block_weights:
        raise UserError(f"{name} has blocks of {block_weights} weights along K, got a weight {shape}")
    ends = [torch.stack(torch.aminmax(weight_NK[rows].float())) for rows in row_chunks(weight_NK)]
    largest = torch.stack(ends).abs().max()
    if not largest.isfinite():
        raise UserError(f"{name} holds finite numbers, got NaN or infinity in a weight {shape}")
    return largest


def row_chunks(weight_NK: Tensor, multiple: int = 1) -> Iterator[slice]:
    """Slices over the rows, each little enough to work on at once and starting at a multiple."""
    num_rows, row_weights = weight_NK.shape
    limit = _CPU_CHUNK_WEIGHTS if weight_NK.device.type == "cpu" else _GPU_CHUNK_WEIGHTS
    step = max(limit // row_weights // multiple, 1) * multiple
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def look_up_pairs(codes_NB: Tensor, pairs_C2: Tensor) -> Tensor:
    """Two values for each byte, [N, 2B]: one gather of the pair as a single number of twice the size."""
    pair = torch.int64 if pairs_C2.element_size() == 4 else torch.int32
    found = pairs_C2.view(pair).flatten().index_select(0, codes_NB.flatten().int())
    return found.view(pairs_C2.dtype).view(codes_NB.shape[0], -1)
