"""Unpack weights of a stack into one buffer: out[g] = the operand of weight chosen[g], without its alpha.

    codes   uint8 [E, N, K / 2]    scales  [E, N, K / 16] E4M3, or [E, N, K / 32] E8M0
    out     bfloat16 [G, N, K]

E weights in the stack, G chosen. NVFP4 and MXFP4 are unpacked by one kernel on a GPU, which moves 2.56 bytes
a weight; other formats, dtypes and devices weight by weight by PyTorch's operations, with the same numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.formats import BF16, MXFP4, NVFP4, PackedWeight
from qerl.formats.stack import ChosenStack, PackedStack, WeightStack
from qerl.kernels.runtime import row_kernel

CASES = (("nvfp4", 3, 64, 96), ("mxfp4", 5, 96, 64), ("nvfp4", 4, 8, 16), ("mxfp4", 2, 1536, 2048))  # E, N, K
_BLOCKS: dict[type[PackedWeight], int] = {NVFP4: 16, MXFP4: 32}
_UNIT, _THREADS = 16, 256


def reference(stack: WeightStack, chosen: Sequence[int]) -> Tensor:
    """Compute the definition in float64, weight by weight."""
    return torch.stack([stack[e].operand(torch.float32).double() for e in chosen])


def unpack_stack(
    stack: WeightStack, chosen: Sequence[int], chosen_G: Tensor, buffer: Tensor, times_alpha: bool = False
) -> Tensor:
    """Return the operands [G, N, K] of the chosen weights, in the first ones of the buffer [G or more, N, K];
    of BF16 weights that follow each other as a view of the stack. chosen_G: the same ids, int32 on the
    device. times_alpha: with the alphas of a ChosenStack's rows."""
    (_, n, k), count = stack.shape, len(chosen)
    if not needs_buffer(stack, buffer.dtype):
        whole = stack.tensors()["weight"]
        is_run = chosen[-1] - chosen[0] == count - 1
        return whole[chosen[0] : chosen[-1] + 1] if is_run else whole.index_select(0, chosen_G)
    assert buffer.shape[1:] == (n, k) and len(buffer) >= count and chosen_G.dtype == torch.int32
    out = buffer[:count]
    if isinstance(stack, ChosenStack) and row_kernel.are_vectors(out):
        stack.unpack_chosen(chosen_G, out, times_alpha)
        return out
    if not isinstance(stack, PackedStack) or stack.kind not in _BLOCKS or not row_kernel.are_vectors(out):
        for each, e in zip(out, chosen, strict=True):
            each.copy_(stack[e].operand(buffer.dtype))
        return out
    units = n * k // _UNIT
    blocks = -(-units // _THREADS)
    kernel = row_kernel.kernel("stack_unpack.cu", "stack_unpack", out.device, BLOCK=_BLOCKS[stack.kind])
    kernel.launch(
        grid=count * blocks,
        block_threads=_THREADS,
        parameters=(stack.parts["codes"], stack.parts["scales"], chosen_G, out, units, blocks),
    )
    return out


def needs_buffer(stack: WeightStack, dtype: torch.dtype) -> bool:
    """False if the operands are the stack's own tensors."""
    return not (isinstance(stack, PackedStack) and stack.kind is BF16 and dtype == torch.bfloat16)
