"""Unquantized weights of linears that read the same x, side by side in one tensor: one product for all.

[W_1; W_2; ...]     [sum N, K] in bfloat16; each linear's weight becomes its rows of it: no second copy
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import BF16
from qerl.model.linear import QuantLinear


def joined(linears: Sequence[QuantLinear]) -> Tensor | None:
    """The tensor, made if it is not there yet; None where a weight is in another format."""
    weights = [linear.weight for linear in linears]
    if not all(isinstance(weight, BF16) for weight in weights):
        return None
    parts = [linear.operand() for linear in linears]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    if all(part.data_ptr() == end for part, end in zip(parts[1:], ends, strict=False)):
        rows = sum(len(part) for part in parts)
        if (
            parts[0].untyped_storage().nbytes() - parts[0].storage_offset() * 2
            >= rows * parts[0].shape[1] * 2
        ):
            return parts[0].as_strided((rows, parts[0].shape[1]), parts[0].stride())
    whole = torch.cat(parts)
    for linear, part in zip(linears, whole.split([len(part) for part in parts]), strict=True):
        linear.load_weight(BF16(part))
    return whole
