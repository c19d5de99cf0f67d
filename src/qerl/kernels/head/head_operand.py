"""The matrix that hidden states are multiplied by for logits, and the slices it is multiplied by in.

head    [V, D] in fp32 or 16 bits: a tensor, or a packed head that is unpacked some rows at a time
slices  rows of it, that is columns of the logits [T, V], as equal as their alignment lets them be
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

MAX_COLUMNS = 1 << 16  # of logits at a time: with 512 rows, 134 MB in fp32
_MAX_UNPACKED = 1 << 26  # weights of a packed head at a time: 134 MB in bfloat16
_ALIGNED = 128  # slices begin at whole blocks of FP8, tiles of NVFP4 and bytes of a mask


@dataclasses.dataclass(frozen=True, slots=True)
class PackedOperand:
    """The operand [V, D] of a packed head."""

    shape: tuple[int, int]
    dtype: torch.dtype
    unpack_rows: Callable[[slice], Tensor]
    """Return these rows, the first of which is a multiple of 128."""


HeadOperand = Tensor | PackedOperand


def operand_rows(head: HeadOperand, rows: slice) -> Tensor:
    return head[rows] if isinstance(head, Tensor) else head.unpack_rows(rows)


def slice_columns(vocab_size: int, width: int, *, is_packed: bool) -> int:
    """Return the number of columns of logits at a time."""
    limit = min(MAX_COLUMNS, _MAX_UNPACKED // width) if is_packed else MAX_COLUMNS
    count = -(-vocab_size // max(limit, _ALIGNED))
    return min(vocab_size, -(-vocab_size // (count * _ALIGNED)) * _ALIGNED)


def slices_of(head: HeadOperand) -> list[slice]:
    vocab_size, width = head.shape
    step = slice_columns(vocab_size, width, is_packed=isinstance(head, PackedOperand))
    return [slice(start, min(start + step, vocab_size)) for start in range(0, vocab_size, step)]
