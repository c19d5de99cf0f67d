"""The experts of gpt-oss: MXFP4 in blocks, one tensor for all experts.

    {x}_blocks   uint8 [E, N, K / 32, 16]   two codes a byte, low nibble = even k
    {x}_scales   uint8 [E, N, K / 32]       E8M0: exponent + 127

    mlp.experts.gate_up_proj   N = 2 F, rows 2 i of gate and 2 i + 1 of up      mlp.experts.down_proj   N = D

Each expert's codes are our MXFP4's, without a change: transformers' convert_moe_packed_tensors, which decodes
all of them to [E, K, N], gives the same numbers
(tests/models/checkpoint/layouts/test_layouts_mxfp4_blocks.py).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl.formats import MXFP4
from qerl.formats.mxfp4 import BLOCK_WEIGHTS
from qerl.models.checkpoint.layouts.four_bit_float import check_exponents
from qerl.models.checkpoint.layouts.layout import Layout, LayoutError, StoredWeight, TensorFolder, read_part

NAME = "mxfp4"
_BLOCKS, _BLOCK_BYTES = "_blocks", BLOCK_WEIGHTS // 2


def read_layout(folder: TensorFolder, config: dict[str, Any]) -> Layout:
    """Show each expert as a weight of its own: mlp.experts.3.gate_up_proj."""
    weights = {}
    for blocks in folder.shapes:
        if not blocks.endswith(_BLOCKS):
            continue
        name = blocks.removesuffix(_BLOCKS)
        num, n, groups, _ = _shape(folder, name)
        at, _, short = name.rpartition(".")
        for expert in range(num):
            weights[f"{at}.{expert}.{short}"] = StoredWeight(
                shape=(n, groups * BLOCK_WEIGHTS),
                kind="MXFP4",
                format=MXFP4.name,
                parts=(blocks, f"{name}_scales"),
                read=partial(read_expert, folder, name, expert),
            )
    return Layout("gpt-oss", weights)


def read_expert(folder: TensorFolder, name: str, expert: int) -> MXFP4:
    """Return one expert's weight [N, K] of {name}_blocks and {name}_scales, of which no other is read; raise
    LayoutError if a tensor is missing, or of another shape or dtype, or holds NaN or infinity."""
    shape, one = _shape(folder, name), slice(expert, expert + 1)
    scales, dtypes = f"{name}_scales", (torch.uint8, torch.float8_e8m0fnu)
    exponents_NG = read_part(folder, scales, dtypes, shape[:-1], one)[0].view(torch.uint8)
    check_exponents(scales, exponents_NG)
    blocks_NGB = read_part(folder, f"{name}{_BLOCKS}", (torch.uint8,), shape, one)[0]
    return MXFP4(blocks_NGB.flatten(1), exponents_NG)


def _shape(folder: TensorFolder, name: str) -> tuple[int, ...]:
    """Return [E, N, K / 32, 16] of the blocks."""
    blocks = f"{name}{_BLOCKS}"
    if blocks not in folder.shapes:
        raise LayoutError(f"has no tensor {blocks}")
    shape = folder.shapes[blocks]
    if len(shape) != 4 or shape[-1] != _BLOCK_BYTES or 0 in shape:
        raise LayoutError(f"{blocks} is {list(shape)}, must be [experts, N, K / 32, {_BLOCK_BYTES}]")
    return shape


def block_tensors(name: str, codes_ENB: Tensor, scales_ENG: Tensor) -> dict[str, Tensor]:
    """Return the tensors of {name} in this layout, from those of a stack of MXFP4 weights; views."""
    return {f"{name}{_BLOCKS}": codes_ENB.unflatten(2, (-1, _BLOCK_BYTES)), f"{name}_scales": scales_ENG}
