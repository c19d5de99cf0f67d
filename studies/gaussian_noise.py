"""Add Gaussian noise to the linears of a checkpoint, with the energy of a format's rounding error.

    W + e_W * Z,   Z ~ N(0, 1),   e_W = rms(W - decode(encode(W)))   for each matrix W

It separates the effect of quantization on a policy from that of any noise of the same size. Z depends only on
(seed, matrix), so all tasks of a seed share it.
"""

import torch
from torch import Tensor

from qerl.algo.seeds import mix
from qerl.formats import PackedWeight
from qerl.models.architecture import Architecture
from qerl.models.checkpoint.encoding import encode_group
from qerl.models.checkpoint.source import Checkpoint
from qerl.models.checkpoint.state_dict import linear_groups, read_float


class GaussianNoiseCheckpoint:
    """Checkpoint with noisy linears, in float32."""

    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, kind: type[PackedWeight], seed: int
    ):
        self.path, self.config, self.shapes = checkpoint.path, checkpoint.config, checkpoint.shapes
        self._checkpoint, self._seed = checkpoint, seed
        self._rms: dict[str, tuple[int, float]] = {}
        """By tensor: the number of the matrix, and e_W."""
        for group in linear_groups(architecture):
            for linear, weight in encode_group(checkpoint, group, kind, torch.device("cpu")):
                error_NK = weight.decode() - read_float(checkpoint, f"{linear}.weight").float()
                rms = error_NK.square().mean().sqrt().item()
                self._rms[f"{linear}.weight"] = len(self._rms), rms

    def read(self, name: str) -> Tensor:
        tensor = self._checkpoint.read(name)
        if name not in self._rms:
            return tensor
        number, rms = self._rms[name]
        rng = torch.Generator().manual_seed(mix(self._seed, number))
        return tensor.float() + rms * torch.randn(tensor.shape, generator=rng)

    def read_rows(self, name: str, rows: slice) -> Tensor:
        return self.read(name)[rows]
