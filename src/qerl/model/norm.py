"""Root-mean-square norms, the noised one included.

    y = x / sqrt(mean(x^2) + eps) * (weight + noise)        fp32 inside, y in x's dtype

The noise is a tensor of its own, fp32 and zero when off (`noise.py` fills it): added to the weight it would
stay there, and in bf16 a sigma below 2e-3 is rounded away where the weight is near 1. Weights are frozen:
only x gets a gradient.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, device: torch.device | str = "cpu"):
        super().__init__()
        self.eps = eps
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(width, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight, self.eps)


class NoisedRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, device: torch.device | str = "cpu"):
        super().__init__()
        self.eps = eps
        self.weight: Tensor
        self.noise: Tensor
        self.register_buffer("weight", torch.empty(width, dtype=torch.float32, device=device))
        self.register_buffer("noise", torch.zeros(width, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight + self.noise, self.eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        scaled, x_hat = dy * weight, x * inverse
        along = (scaled * x_hat).mean(-1, keepdim=True)
        return scaled.sub_(x_hat.mul_(along)).mul_(inverse).to(x.dtype), None, None
