"""A LoRA adapter's product with dropout on its input, in the learner only.

    y_TN = scaling * (d_TK @ a_RK^T) @ b_NR^T     d = x * keep / (1 - rate)     keep_TK ~ Bernoulli(1 - rate)

a, b are fp32 masters, which get the gradient; a_work, b_work their copies in x's dtype, which are multiplied.
The mask is drawn from the seed, in the forward pass and again in the backward pass: it takes no memory in
between, and a layer that is computed again drops the same inputs. PyTorch's dropout keeps T x K bytes.
"""

import torch
from torch import Tensor

CASES = ((1, 64, 96, 4), (37, 128, 48, 8), (128, 576, 192, 32))  # T, K, N, R


def keep_mask(x_TK: Tensor, rate: float, seed: int) -> Tensor:
    """Return keep / (1 - rate) in x's dtype."""
    generator = torch.Generator(x_TK.device).manual_seed(seed)
    return torch.empty_like(x_TK).bernoulli_(1 - rate, generator=generator).div_(1 - rate)


def reference(x_TK: Tensor, mask_TK: Tensor, a_RK: Tensor, b_NR: Tensor, scaling: float) -> Tensor:
    """Compute the definition above in float64 with this mask; differentiable."""
    return scaling * ((x_TK.double() * mask_TK.double()) @ a_RK.double().T) @ b_NR.double().T


def dropped_lora(
    x_TK: Tensor,
    a_RK: Tensor,
    b_NR: Tensor,
    a_work_RK: Tensor,
    b_work_NR: Tensor,
    scaling: float,
    *,
    rate: float,
    seed: int,
) -> Tensor:
    """Return y_TN; differentiable in x, a and b."""
    assert x_TK.dim() == 2 and a_RK.dtype == b_NR.dtype == torch.float32 and 0 < rate < 1
    assert x_TK.dtype == a_work_RK.dtype == b_work_NR.dtype
    return _DroppedLora.apply(x_TK, a_RK, b_NR, a_work_RK, b_work_NR, scaling, rate, seed)


class _DroppedLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, a_RK, b_NR, a_work_RK, b_work_NR, scaling, rate, seed):
        u_TR = (x_TK * keep_mask(x_TK, rate, seed)) @ a_work_RK.T
        ctx.save_for_backward(x_TK, u_TR, a_work_RK, b_work_NR)
        ctx.scaling, ctx.rate, ctx.seed = scaling, rate, seed
        return (u_TR @ b_work_NR.T).mul_(scaling)

    @staticmethod
    def backward(ctx, dy_TN):  # type: ignore[override]
        x_TK, u_TR, a_work_RK, b_work_NR = ctx.saved_tensors
        mask_TK = keep_mask(x_TK, ctx.rate, ctx.seed)
        du_TR = dy_TN @ b_work_NR
        da_RK = (du_TR.T @ (x_TK * mask_TK)).float().mul_(ctx.scaling)
        db_NR = (dy_TN.T @ u_TR).float().mul_(ctx.scaling)
        dx_TK = (du_TR @ a_work_RK).mul_(mask_TK).mul_(ctx.scaling) if ctx.needs_input_grad[0] else None
        return dx_TK, da_RK, db_NR, None, None, None, None, None
