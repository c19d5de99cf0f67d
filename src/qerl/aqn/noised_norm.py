"""RMSNorm with a noise tensor beside its weight.

    y = x / sqrt(mean(x^2) + eps) * (weight + noise)        fp32 inside, y in the compute dtype

The noise is a separate fp32 tensor, zero when off (`norm_noise.py` fills it): one vector for all tokens, or a
table with one row for each noise key (`noise_table.py`). It is never added to the weight: in bf16 a sigma
below 2e-3 would be rounded away where the weight is near 1. A trained weight (adapter.train_norms) has a
master, `full`, which gets its gradient; the noise is added to the trained weight.
"""

import torch
from torch import Tensor, nn

from qerl.kernels.pointwise.rms_norm import fork, rms_norm


class NoisedRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, *, compute: torch.dtype, device: torch.device):
        super().__init__()
        self.eps, self.compute = eps, compute
        self.weight: Tensor
        self.noise: Tensor
        self.register_buffer("weight", torch.empty(width, dtype=torch.float32, device=device))
        self.full: nn.Parameter | None
        self.register_parameter("full", None)
        self.base: Tensor | None = None
        self.register_buffer("noise", torch.zeros(width, dtype=torch.float32, device=device))

    def forward(
        self, h_TD: Tensor, noise_rows_T: Tensor | None = None, *, room: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return (x, h). x has `room` more columns behind each row where the kernel can leave them; h may be
        added to in place."""
        noise, rows_T = self.noise_of(noise_rows_T)
        options = {"dtype": self.compute, "rows_T": rows_T, "master_D": self.full}
        return fork(h_TD, self.weight, noise, self.eps, room=room, **options)

    def normed(self, y_TD: Tensor, noise_rows_T: Tensor | None = None) -> Tensor:
        """Return the norm alone, of what is not used again."""
        noise, rows_T = self.noise_of(noise_rows_T)
        options = {"dtype": self.compute, "rows_T": rows_T, "master_D": self.full}
        return rms_norm(y_TD, self.weight, noise, self.eps, **options)

    def plain(self, y_TD: Tensor) -> Tensor:
        """Return the norm alone, without noise."""
        return rms_norm(y_TD, self.weight, None, self.eps, dtype=self.compute, master_D=self.full)

    def noise_of(self, noise_rows_T: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return (noise, its rows) as the kernels take them; a table without rows is no noise."""
        if self.noise.dim() == 1:
            return self.noise, None
        return None if noise_rows_T is None else self.noise, noise_rows_T
