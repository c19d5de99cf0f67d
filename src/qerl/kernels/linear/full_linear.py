"""y = x @ W^T of a weight that is trained itself.

    y_TN = x_TK @ work_NK^T + bias_N        dx = dy @ work        dmaster = dy^T @ x, fp32

The optimizer updates master, in fp32: it gets the gradient and is not multiplied. work is its copy in x's
dtype: it is multiplied and gets no gradient.
"""

import torch
from torch import Tensor

from qerl.kernels.pointwise.matmul_fp32 import product

CASES = ((1, 64, 96), (37, 128, 48), (128, 576, 192))  # T, K, N


def reference(x_TK: Tensor, work_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Compute the definition above in float64; differentiable."""
    y_TN = x_TK.double() @ work_NK.double().T
    return y_TN if bias_N is None else y_TN + bias_N.double()


def full_linear(x_TK: Tensor, work_NK: Tensor, master_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return y_TN; differentiable in x and the master."""
    assert x_TK.dim() == 2 and master_NK.dtype == torch.float32 and x_TK.dtype == work_NK.dtype
    assert work_NK.shape == master_NK.shape
    return _FullLinear.apply(x_TK, work_NK, master_NK, bias_N)


class _FullLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, work_NK, master_NK, bias_N):
        ctx.save_for_backward(x_TK, work_NK)
        return torch.nn.functional.linear(x_TK, work_NK, bias_N)

    @staticmethod
    def backward(ctx, dy_TN):  # type: ignore[override]
        x_TK, work_NK = ctx.saved_tensors
        dx_TK = dy_TN @ work_NK if ctx.needs_input_grad[0] else None
        dmaster_NK = product(dy_TN.T, x_TK) if ctx.needs_input_grad[2] else None
        return dx_TK, None, dmaster_NK, None
