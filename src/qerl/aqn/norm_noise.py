"""The noise of AQN: a Gaussian beside the norm weights during sampling.

    noise = sigma * Z              unit "absolute": sigma in the unit of the weights (QeRL, arXiv 2510.11696)
    noise = sigma * rms(w) * Z     unit "relative": sigma as a fraction of each norm's size

One Z for the norm before q|k|v and one for that before gate|up of each layer; no other norm is noised. Z
depends on (seed, step, layer) only, and with a noise table on the row's key. It is generated on the CPU, so
it is the same on every device.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from qerl.algo.seeds import mix
from qerl.aqn.noise_table import NoiseTable, NormWithNoise


@contextlib.contextmanager
def noised(
    table: NoiseTable, *, sigma: float, unit: Literal["absolute", "relative"], seed: int, step: int
) -> Iterator[int]:
    """Apply noise inside the context; yield the number of noised norms, 0 if sigma is 0."""
    norms = table.norms if sigma > 0 else []
    draw = _Draw(norms, sigma, unit, seed, step)
    try:
        if norms and not table.is_open:
            draw.into([norm.noise for norm in norms], [()])
        elif norms:
            table.start(lambda rows, keys: draw.into([n.noise[rows] for n in norms], [(k,) for k in keys]))
        yield len(norms)
    finally:
        table.stop()
        for norm in norms:
            norm.noise.zero_()


@dataclasses.dataclass(frozen=True, slots=True)
class _Draw:
    norms: Sequence[NormWithNoise]
    sigma: float
    unit: Literal["absolute", "relative"]
    seed: int
    step: int

    def into(self, targets: Sequence[Tensor], keys: Sequence[tuple[int, ...]]) -> None:
        """Write each norm's noise into its target: one row per key, or [D] for a single key."""
        for layer_index, first in enumerate(range(0, len(self.norms), 2)):
            pair = self.norms[first : first + 2]
            z_S2D = torch.stack([self._z(layer_index, key, len(pair[0].weight)) for key in keys])
            for place, norm in enumerate(pair):
                target = targets[2 * layer_index + place]
                size = norm.weight.square().mean().sqrt() if self.unit == "relative" else 1.0
                target.copy_(z_S2D[:, place].reshape(target.shape)).mul_(self.sigma * size)

    def _z(self, layer_index: int, key: tuple[int, ...], width: int) -> Tensor:
        rng = torch.Generator().manual_seed(mix(self.seed, self.step, layer_index, *key))
        return torch.randn(2, width, generator=rng)
