"""Weights of linears that read the same x, side by side in one tensor: one product for all.

[W_1; W_2; ...]     [sum N, K] in bfloat16, or codes and scales of FP8Flow where 128 divides each N

Each linear's weight becomes its rows of it: no second copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import BF16, FP8Flow
from qerl.formats.fp8 import BLOCK
from qerl.models.linear import QuantLinear


def fuse_weights(linears: Sequence[QuantLinear]) -> Tensor | None:
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


def fuse_fp8_weights(linears: Sequence[QuantLinear]) -> FP8Flow | None:
    """The same for FP8Flow; None where a weight is in another format, or shares a block with the next."""
    weights = [linear.weight for linear in linears if isinstance(linear.weight, FP8Flow)]
    if len(weights) < len(linears) or any(weight.shape[0] % BLOCK for weight in weights[:-1]):
        return None
    if len(weights) == 1:
        return weights[0]
    codes, scales = torch.cat([w.codes for w in weights]), torch.cat([w.scales for w in weights])
    sizes = [w.shape[0] for w in weights], [len(w.scales) for w in weights]
    for linear, *part in zip(linears, codes.split(sizes[0]), scales.split(sizes[1]), strict=True):
        linear.load_weight(FP8Flow(*part))
    return FP8Flow(codes, scales)
