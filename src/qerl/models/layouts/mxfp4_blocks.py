"""The experts of gpt-oss: MXFP4 in blocks, one tensor for all experts.

    {x}_blocks   uint8 [E, N, K / 32, 16]   two codes a byte, low nibble = even k
    {x}_scales   uint8 [E, N, K / 32]       E8M0: exponent + 127

    mlp.experts.gate_up_proj   N = 2 F, rows 2 i of gate and 2 i + 1 of up      mlp.experts.down_proj   N = D

Each expert's codes are our MXFP4's, without a change: transformers' convert_moe_packed_tensors, which decodes
all of them to [E, K, N], gives the same numbers (tests/models/test_layouts_mxfp4_blocks.py).
"""

import torch
from torch import Tensor

from qerl.errors import UserError
from qerl.formats import MXFP4
from qerl.formats.mxfp4 import BLOCK_WEIGHTS
from qerl.models.layouts.four_bit_float import mxfp4_scales
from qerl.models.layouts.layout import TensorFolder, read_part

_BLOCK_BYTES = BLOCK_WEIGHTS // 2


def read_experts(folder: TensorFolder, name: str) -> list[MXFP4]:
    """Return each expert's weight [N, K] of {name}_blocks and {name}_scales, in one memory for all; raise
    UserError if a tensor is missing, or of another shape or dtype, or holds NaN or infinity."""
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    if blocks not in folder.shapes:
        raise UserError(f"{folder.path}: has no tensor {blocks}")
    shape = folder.shapes[blocks]
    if len(shape) != 4 or shape[-1] != _BLOCK_BYTES or 0 in shape:
        raise UserError(
            f"{folder.path}: {blocks} is {list(shape)}, must be [experts, N, K / 32, {_BLOCK_BYTES}]"
        )
    dtypes = (torch.uint8, torch.float8_e8m0fnu)
    exponents_ENG = read_part(folder, scales, dtypes, shape[:-1]).view(torch.uint8)
    mxfp4_scales(folder, scales, exponents_ENG)
    return unpack_experts(read_part(folder, blocks, torch.uint8, shape), exponents_ENG)


def unpack_experts(blocks_ENGB: Tensor, scales_ENG: Tensor) -> list[MXFP4]:
    """Return each expert's weight [N, K]; the tensors are views."""
    return [MXFP4(codes, scales) for codes, scales in zip(blocks_ENGB.flatten(2), scales_ENG, strict=True)]
