"""Adaptive quantization noise: a Gaussian beside the norm weights, while samples are drawn.

    noise = sigma * Z              unit "absolute": sigma in the weights' own units (QeRL, arXiv 2510.11696)
    noise = sigma * rms(w) * Z     unit "relative": sigma as a fraction of each norm's size

One Z for the norm before q|k|v and one for that before gate|up of each layer; no other norm is noised. Z
depends on (seed, step, layer) alone and is drawn on the CPU, so it is the same on every device.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from qerl.model.decoder import Decoder
from qerl.seeds import mix


@contextlib.contextmanager
def noised(
    decoder: Decoder, *, sigma: float, unit: Literal["absolute", "relative"], seed: int, step: int
) -> Iterator[int]:
    """Noise inside, none after; yields how many norms took it, 0 if sigma is 0."""
    norms = decoder.noised_norms() if sigma > 0 else []
    try:
        for index, norm in enumerate(norms):
            layer_index, place = divmod(index, 2)
            rng = torch.Generator().manual_seed(mix(seed, step, layer_index))
            z_2D = torch.randn(2, len(norm.noise), generator=rng)
            size = norm.weight.square().mean().sqrt() if unit == "relative" else 1.0
            norm.noise.copy_(z_2D[place]).mul_(sigma * size)
        yield len(norms)
    finally:
        for norm in norms:
            norm.noise.zero_()
