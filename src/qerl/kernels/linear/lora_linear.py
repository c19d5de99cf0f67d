"""y = x @ W^T of a frozen weight plus the product of its LoRA adapter.

    y_TN = alpha * (x_TK @ operand_NK^T) + scaling * (x_TK @ a_RK^T) @ b_NR^T + bias_N

K input features, N output features (elements, never bytes).

    operand()   [N, K] in x's dtype: called once in each pass, so that a packed weight is unpacked twice
                and not kept unpacked from the forward pass to the backward pass
    alpha       the factor that the operand leaves out: one number, or fp32 [N] with one for each row
    a, b        fp32 masters: they get fp32 gradients and are not multiplied
    a_work ...  working copies in x's dtype: they are multiplied and get no gradient

alpha and the adapter's product are part of the frozen product's epilogue: at [128, 576] x [576, 576] (bf16, 2
cores) that addmm takes 120 us and the product alone 111; a separate multiplication or addition takes 7 to
17 us and rounds once more. For one linear: fused_linear.py has the linears of one input in one product.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qerl.kernels.pointwise.matmul_fp32 import summed

CASES = ((1, 256, 160, 8), (37, 64, 96, 8), (128, 576, 192, 32))  # T, K, N, R


class Adapter(NamedTuple):
    """a, b: fp32 masters, which get the gradients; their working copies in x's dtype are multiplied."""

    a_RK: Tensor
    b_NR: Tensor
    a_work_RK: Tensor
    b_work_NR: Tensor
    scaling: float


def reference(
    x_TK: Tensor,
    operand_NK: Tensor,
    alpha: float | Tensor,
    a_RK: Tensor | None,
    b_NR: Tensor | None,
    scaling: float,
    bias_N: Tensor | None,
) -> Tensor:
    """Compute the definition above in float64; differentiable."""
    y_TN = (x_TK.double() @ operand_NK.double().T) * alpha
    if a_RK is not None and b_NR is not None:
        y_TN = y_TN + scaling * (x_TK.double() @ a_RK.double().T) @ b_NR.double().T
    return y_TN if bias_N is None else y_TN + bias_N.double()


def lora_linear(
    x_TK: Tensor,
    operand: Callable[[], Tensor],
    alpha: float | Tensor,
    adapter: Adapter | None,
    bias_N: Tensor | None,
    *,
    needs_output: bool = True,
) -> Tensor:
    """Return y_TN; differentiable in x and the masters. Without an adapter it is bitwise as with b = 0.

    needs_output: False if only gradients are needed; y is then zeros where there is an adapter.
    """
    assert x_TK.dim() == 2
    if adapter is not None:
        assert adapter.a_RK.dtype == adapter.b_NR.dtype == torch.float32
        assert x_TK.dtype == adapter.a_work_RK.dtype == adapter.b_work_NR.dtype
    return _LoraLinear.apply(x_TK, operand, alpha, bias_N, needs_output, *(adapter or (None,) * 5))


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, operand, alpha, bias_N, needs_output, a_RK, b_NR, a_work_RK, b_work_NR, scaling):
        u_TR = None if a_work_RK is None else x_TK @ a_work_RK.T
        ctx.save_for_backward(None if u_TR is None else x_TK, u_TR, a_work_RK, b_work_NR)
        ctx.operand, ctx.alpha, ctx.scaling = operand, alpha, scaling
        if u_TR is not None and not needs_output:
            return x_TK.new_zeros(len(x_TK), len(b_work_NR))
        plus_TN = None if u_TR is None else u_TR @ b_work_NR.T
        y_TN = _scaled_product(x_TK, operand().T, alpha, plus_TN, scaling)
        return y_TN if bias_N is None else y_TN.add_(bias_N)

    @staticmethod
    def backward(ctx, dy_TN):  # type: ignore[override]
        x_TK, u_TR, a_work_RK, b_work_NR = ctx.saved_tensors
        dx_TK = da_RK = db_NR = plus_TK = None
        if u_TR is not None:
            du_TR = dy_TN @ b_work_NR
            da_RK = summed(du_TR, x_TK, ctx.scaling, multiply=_rounded)
            db_NR = summed(dy_TN, u_TR, ctx.scaling, multiply=_rounded)
            plus_TK = du_TR @ a_work_RK if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[0]:
            alpha = ctx.alpha
            if isinstance(alpha, Tensor):  # one for each output multiplies dy
                dy_TN, alpha = (dy_TN * alpha).to(dy_TN.dtype), 1.0
            dx_TK = _scaled_product(dy_TN, ctx.operand(), alpha, plus_TK, ctx.scaling)
        return dx_TK, None, None, None, None, da_RK, db_NR, None, None, None


def _rounded(a_MK: Tensor, b_KN: Tensor, alpha: float) -> Tensor:
    return (a_MK @ b_KN).float().mul_(alpha)


def _scaled_product(
    x_TK: Tensor, operand_KN: Tensor, alpha: float | Tensor, plus: Tensor | None, scaling: float | None
) -> Tensor:
    """Return alpha * (x @ operand) + scaling * plus."""
    if isinstance(alpha, Tensor):
        y_TN = torch.mm(x_TK, operand_KN).mul_(alpha)
        return y_TN if plus is None else y_TN.add_(plus, alpha=scaling)
    if plus is None:
        plus, scaling = x_TK.new_empty(1, 1), 0.0  # beta 0 reads nothing of it
    return torch.addmm(plus, x_TK, operand_KN, beta=scaling, alpha=alpha)
