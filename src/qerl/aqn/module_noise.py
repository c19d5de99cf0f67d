"""Noise for the RMSNorms of a model that is not ours: added to what the norm's own code returns.

    y = norm(x) + x / sqrt(mean(x^2) + eps) * noise        the product in fp32, y in the norm's dtype

for a norm of any spelling, such as (1 + w) for w: x / rms(x) * (weight + noise) as in noised_norm.py. While
the noise is zero the norm's result is left as it is, bit for bit.
"""

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_EPS_NAMES = "variance_epsilon", "eps", "epsilon"
_TOLERANCE = 0.03  # of a probe, computed in bf16; a LayerNorm is off by more than 1


class ModuleNoise:
    """The noise of one norm; `add` is its forward hook."""

    def __init__(self, weight: Tensor, eps: float):
        """weight: what the norm multiplies by, fp32 [D]."""
        self.weight, self._eps = weight, eps
        self.noise = torch.zeros_like(weight)

    def add(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        if not self.noise.any():
            return None
        return (y.float() + _normalized(args[0], self._eps) * self.noise).to(y.dtype)


def add_noise(model: nn.Module, width: int) -> list[ModuleNoise]:
    """Put a hook on every RMSNorm of this width that stands directly in a layer; return their noises in
    order. The model's weights must be loaded."""
    noises = []
    for norm in _candidates(model, width):
        eps = _eps_of(norm)
        weight = None if eps is None else _weight_of(norm, eps, width)
        if eps is not None and weight is not None:
            noises.append(ModuleNoise(weight, eps))
            norm.register_forward_hook(noises[-1].add)
    return noises


def _candidates(model: nn.Module, width: int) -> Iterator[nn.Module]:
    for modules in model.modules():
        if isinstance(modules, nn.ModuleList):
            for layer in modules:
                for child in layer.children():
                    weight = getattr(child, "weight", None)
                    if isinstance(weight, Tensor) and weight.shape == (width,) and _takes_one(child):
                        yield child


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _eps_of(norm: nn.Module) -> float | None:
    values = (getattr(norm, name, None) for name in _EPS_NAMES)
    return next((eps for eps in values if isinstance(eps, float)), None)


@torch.no_grad()
def _weight_of(norm: nn.Module, eps: float, width: int) -> Tensor | None:
    """Return what the norm multiplies by, fp32 [D]; None if it does not compute an RMSNorm."""
    weight_D = norm.weight
    assert isinstance(weight_D, Tensor)
    ones = torch.ones(1, width, dtype=weight_D.dtype, device=weight_D.device)
    rng = torch.Generator().manual_seed(0)
    x_1D = torch.randn(1, width, generator=rng).add_(0.5).to(ones)
    weight = norm(ones).float()[0] * (1 + eps) ** 0.5
    expected_1D = norm(x_1D).float()
    error_1D = _normalized(x_1D, eps) * weight - expected_1D
    return weight if error_1D.norm() <= _TOLERANCE * expected_1D.norm() else None


def _normalized(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
