"""Gaussian noise in the linears of a checkpoint, as much of it as a format's rounding makes.

    W + e_W * Z,   Z ~ N(0, 1),   e_W = rms(W - decode(encode(W)))   for each matrix W

It asks whether what quantization does to a policy is quantization's, or any noise's of that size. Z depends
on (seed, matrix) alone.
"""

import torch
from torch import Tensor

from qerl.algo.seeds import mix
from qerl.formats import PackedWeight
from qerl.models.architecture import Architecture
from qerl.models.compressed_tensors import encoded
from qerl.models.source import Checkpoint
from qerl.models.state_dict import linear_groups, read_float


class GaussianNoiseCheckpoint:
    """A checkpoint that is read like any other; its linears are float32."""

    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, kind: type[PackedWeight], seed: int
    ):
        self.path, self.config, self.shapes = checkpoint.path, checkpoint.config, checkpoint.shapes
        self._checkpoint, self._seed = checkpoint, seed
        self._rms: dict[str, tuple[int, float]] = {}
        """By tensor: the matrix's number, and e_W."""
        for group in linear_groups(architecture):
            for linear, weight in encoded(checkpoint, group, kind, torch.device("cpu")):
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
