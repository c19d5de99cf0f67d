"""y = (up + 1) * gate * sigmoid(alpha * gate) of clamped gate and up, the activation of gpt-oss's experts.

    gate = min(gate, limit)        up = clamp(up, -limit, limit)

fp32 inside, rounded once. A clamped element has no gradient. Source: openai/gpt-oss, torch/model.py.
"""

import torch
from torch import Tensor

CASES = ((1, 8), (5, 96), (33, 264))  # T, F


def reference(gate_TF: Tensor, up_TF: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Compute the definition in float64; differentiable."""
    gate_TF = torch.minimum(gate_TF.double(), torch.tensor(limit, dtype=torch.float64))
    up_TF = up_TF.double().clamp(-limit, limit)
    return (up_TF + 1) * gate_TF / (1 + torch.exp(-alpha * gate_TF))


def clamped_swiglu(gate_TF: Tensor, up_TF: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Return y_TF in the inputs' dtype; differentiable."""
    assert gate_TF.shape == up_TF.shape and gate_TF.dtype == up_TF.dtype
    gate, up = gate_TF.float().clamp(max=limit), up_TF.float().clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_TF.dtype)
