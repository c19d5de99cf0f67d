"""Weights of linears that read the same x, as one operand: one product for all.

FusedBF16     [W_1 | b_1       ]    [sum N, K + R]: where BF16 weights and the adapters' b are stored
              [W_2 |     b_2   ]    R: the ranks of all adapters, up to a multiple of 16; the rest is zero
FusedPacked   [W_1; W_2; ...]       [sum N, K]: unpacked for each product, from any other format
FP8Flow       codes and scales, one after the other, where 128 divides each N

y = [x | u] @ [W | b]^T adds the adapters in the accumulator of the product (kernels/linear/fused_linear.py).
Each linear's BF16 or FP8Flow weight becomes a slice of the tensor, so there is no second copy, and
`publish` writes its b there. Rows of FusedBF16 begin at multiples of 128 bytes.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import BF16, FP8Flow, PackedWeight
from qerl.formats.fp8 import BLOCK
from qerl.kernels.tiles.row_slots import kernel_rank
from qerl.models.linear import QuantLinear

_ROW_ELEMENTS = 64


@dataclasses.dataclass(frozen=True, eq=False)
class FusedBF16:
    wide_NC: Tensor
    """[W | b], K + R columns."""
    rank: int
    """Sum of the adapters' ranks, at most R."""
    weights: tuple[PackedWeight, ...]
    """Each linear's, a slice of it."""
    in_width: int

    def operand(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Return W, with b behind its rows; `out` is not needed."""
        assert dtype == self.wide_NC.dtype
        return self.wide_NC[:, : self.in_width]


@dataclasses.dataclass(frozen=True, eq=False)
class FusedPacked:
    weights: tuple[PackedWeight, ...]
    in_width: int

    def operand(self, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Unpack the weights one after the other, [sum N, K], into `out` if given."""
        widths = [weight.shape[0] for weight in self.weights]
        if out is None and len(widths) == 1:
            return self.weights[0].operand(dtype)
        if out is None:
            device = self.weights[0].alpha.device
            out = torch.empty(sum(widths), self.in_width, dtype=dtype, device=device)
        for rows, weight in zip(out.split(widths), self.weights, strict=True):
            rows.copy_(weight.operand(dtype))
        return out


def fuse_weights(linears: Sequence[QuantLinear]) -> FusedBF16 | FusedPacked | None:
    """Return these linears' operand, made at the first call; None where each must multiply for itself."""
    first = linears[0].fused
    if isinstance(first, FusedBF16 | FusedPacked) and _is_of(first, linears):
        return first
    weights = tuple(linear.weight for linear in linears if linear.weight is not None)
    assert len(weights) == len(linears), "no weight was loaded"
    if any(isinstance(weight, FP8Flow) for weight in weights):
        return None  # its products are of codes
    if linears[0].compute == torch.bfloat16 and all(isinstance(weight, BF16) for weight in weights):
        fused = _fuse_bf16(linears)
    elif any(linear.is_resident for linear in linears):
        return None
    else:
        fused = FusedPacked(weights, linears[0].in_width)
    for linear in linears:
        linear.fused = fused
    return fused


def _is_of(fused: FusedBF16 | FusedPacked, linears: Sequence[QuantLinear]) -> bool:
    weights = fused.weights
    return len(weights) == len(linears) and all(
        linear.fused is fused and linear.weight is weight
        for linear, weight in zip(linears, weights, strict=True)
    )


def _fuse_bf16(linears: Sequence[QuantLinear]) -> FusedBF16:
    operands, columns = [linear.operand() for linear in linears], linears[0].in_width
    ranks = [0 if linear.b_work is None else linear.b_work.shape[1] for linear in linears]
    wide = columns + kernel_rank(sum(ranks))
    row = -(-wide // _ROW_ELEMENTS) * _ROW_ELEMENTS if any(ranks) else columns
    num_rows = sum(len(operand) for operand in operands)
    whole = torch.empty(num_rows, row, dtype=operands[0].dtype, device=operands[0].device)
    whole[:, columns:].zero_()
    parts = whole.split([len(operand) for operand in operands])
    for linear, operand, rows, rank in zip(linears, operands, parts, ranks, strict=True):
        is_resident = linear.is_resident
        linear.load_weight(BF16(rows[:, : linear.in_width].copy_(operand)))
        if is_resident:
            linear.make_resident()
        if linear.b_work is not None:
            linear.b_fused = rows[:, columns : columns + rank].copy_(linear.b_work)
            columns += rank
    weights = tuple(linear.weight for linear in linears if linear.weight is not None)
    return FusedBF16(whole[:, :wide], sum(ranks), weights, linears[0].in_width)


def fuse_fp8_weights(linears: Sequence[QuantLinear]) -> FP8Flow | None:
    """Return FP8Flow weights as one weight; None where one is in another format, or shares a block with the
    next."""
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
