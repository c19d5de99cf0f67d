"""RMSNorm without noise: y = x / sqrt(mean(x^2) + eps) * weight, fp32 inside, y in the compute dtype.

The norms that AQN adds noise to are in `aqn/noised_norm.py`. A weight that is trained has a master, `full`.
"""

import torch
from torch import Tensor

from qerl.kernels.pointwise.rms_norm import rms_norm
from qerl.models.linear import FrozenWeight


class RMSNorm(FrozenWeight):
    def __init__(self, width: int, eps: float, *, compute: torch.dtype, device: torch.device):
        super().__init__(width, dtype=torch.float32, device=device)
        self.eps, self.compute = eps, compute

    def normed(self, y_TD: Tensor, noise_rows_T: Tensor | None = None) -> Tensor:
        """Return the norm as a NoisedRMSNorm does; there is no noise."""
        return self(y_TD)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, None, self.eps, dtype=self.compute, master_D=self.full)
