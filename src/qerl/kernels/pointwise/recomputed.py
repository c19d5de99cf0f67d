"""Run a kernel in the forward pass, and PyTorch's operations in the backward pass.

The backward pass computes the operations once more from the saved inputs, with gradients. They need not have
the kernel's bits: the gradient is that of the operations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


def recomputed(kernel: Function, operations: Function, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return kernel(*inputs); the gradients in the inputs are those of operations(*inputs)."""
    return _Recomputed.apply(kernel, operations, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, operations, *inputs):
        ctx.operations = operations
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needed, strict=True)]
            outputs = ctx.operations(*leaves)
            wanted = [x for x in leaves if x.requires_grad]
            computed = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        return None, None, *(next(computed) if need else None for need in needed)
