"""Cut rows out of a packed weight, for linears that a checkpoint stores as one (q | k | v, gate | up)."""

import torch
from torch import Tensor

from qerl.formats import BF16, FP8, INT8, MXFP4, NF4, NVFP4, PackedWeight
from qerl.formats.fp8 import BLOCK
from qerl.formats.nf4 import BLOCK_WEIGHTS, GROUP_BLOCKS


def cut_rows(weight: PackedWeight, rows: slice) -> PackedWeight | None:
    """Return the rows, with the same codes and the same values; None if blocks of codes span a cut, so that
    the rows alone are not a weight of this format."""
    if isinstance(weight, NVFP4):
        return NVFP4(weight.codes[rows], weight.scales[rows], weight.global_scale)
    if isinstance(weight, MXFP4 | INT8):
        return type(weight)(weight.codes[rows], weight.scales[rows])
    if isinstance(weight, BF16):
        return BF16(weight.weight[rows])
    if isinstance(weight, FP8):
        scales = _block_rows(weight.scales, rows)
        return None if scales is None else type(weight)(weight.codes[rows], scales)
    assert isinstance(weight, NF4), weight
    return _cut_nf4(weight, rows)


def _block_rows(scales: Tensor, rows: slice) -> Tensor | None:
    """Return the scales of blocks of 128 rows that begin at rows.start; None if these have several scales."""
    if rows.start % BLOCK == 0:
        return scales[rows.start // BLOCK : -(-rows.stop // BLOCK)].contiguous()
    by_row = scales.repeat_interleave(BLOCK, dim=0)[rows]
    blocks = by_row.split(BLOCK)
    if any(not torch.equal(block, block[:1].expand_as(block)) for block in blocks):
        return None
    return torch.stack([block[0] for block in blocks])


def _cut_nf4(weight: NF4, rows: slice) -> NF4 | None:
    row_blocks = weight.shape[1] // BLOCK_WEIGHTS
    start, stop = rows.start * row_blocks, rows.stop * row_blocks
    if start % GROUP_BLOCKS:
        return None
    groups = slice(start // GROUP_BLOCKS, -(-stop // GROUP_BLOCKS))
    codes, absmax_codes = weight.codes[rows], weight.absmax_codes[start:stop]
    return NF4(codes, absmax_codes, weight.absmax_scales[groups], weight.absmax_offset)
