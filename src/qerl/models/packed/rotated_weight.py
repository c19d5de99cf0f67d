"""Weights of one input in 8-bit integers, for the products that give the gradient (learn.backward)."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.kernels.linear.fused_linear import Operand, RotatedOperand
from qerl.kernels.linear.int8_codes import NEIGHBORS, RotatedWeight, Rotation, Weight, WeightTiles, can_rotate
from qerl.models.linear import OperandGroup, QuantLinear
from qerl.models.linear_pass import LinearPass, OperandCache


def is_rotated(
    x_TK: Tensor, group: OperandGroup, linears: Sequence[QuantLinear], linear_pass: LinearPass
) -> bool:
    """True if the linears' products for the gradient are of integers."""
    n = sum(linear.out_width for linear in linears)
    return linear_pass.backward == "int8" and x_TK.dtype == torch.bfloat16 and can_rotate(n, group.in_width)


def rotated_operand(
    operand: Operand,
    group: OperandGroup,
    tiles: WeightTiles | None,
    linears: Sequence[QuantLinear],
    linear_pass: LinearPass,
) -> RotatedOperand:
    """Return the operand with its integers, made from the tiles if there are any, else from the operand."""
    rotated = functools.partial(_rotated, operand, group, tiles, linears, linear_pass.operands)
    has_bias = any(linear.bias is not None for linear in linears)
    has_again = linear_pass.is_repeated and group.in_width % NEIGHBORS == 0 and not has_bias
    again = functools.partial(rotated, along_k=True) if has_again else None
    return RotatedOperand(operand, functools.partial(rotated, along_k=False), again)


def _rotated(
    operand: Operand,
    group: OperandGroup,
    tiles: WeightTiles | None,
    linears: Sequence[QuantLinear],
    unpacked: OperandCache | None,
    *,
    along_k: bool,
) -> RotatedWeight:
    """Return the weight in integers, made again for each pass unless operands are held."""

    def weight() -> Weight:
        return operand(torch.bfloat16, False) if tiles is None else tiles

    first, operand_or_tiles = linears[0], None
    of_group, rotation = first.rotations.get(along_k, (None, None))
    if rotation is None or of_group is not group:
        operand_or_tiles = w = weight()
        alphas = (torch.as_tensor(x.alpha, dtype=torch.float32, device=w.device) for x in linears)
        factors = [alpha.expand(x.out_width) for alpha, x in zip(alphas, linears, strict=True)]
        rotation = Rotation.of(w, torch.cat(factors), along_k=along_k)
        first.rotations[along_k] = group, rotation

    def codes() -> Tensor:
        return rotation.codes(weight() if operand_or_tiles is None else operand_or_tiles)

    if unpacked is None or not unpacked.is_held:
        return RotatedWeight(codes(), rotation)
    return RotatedWeight(unpacked.of(rotation, codes), rotation)
