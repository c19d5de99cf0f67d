"""Weights to encode: real shapes, with the outliers, empty blocks and magnitudes that real ones may have."""

import torch


def _heavy_tailed(num_rows, num_columns, seed):
    """A normal over the root of a uniform, up to 30 times its scale; the odd rows are the first."""
    rng = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(num_rows, num_columns, generator=rng) * 0.02
    weight_NK /= torch.rand(num_rows, num_columns, generator=rng).clamp(min=1e-3).sqrt()
    weight_NK[0] *= 100
    weight_NK[1] *= 1e-6
    weight_NK[2] = 0
    weight_NK[3, ::2] = 0
    weight_NK[4] *= 1e-35
    weight_NK[5:9] *= torch.logspace(-30, 0, num_columns)
    weight_NK[9, 64:128] = 0
    weight_NK[10] = weight_NK[10].abs()
    return weight_NK


def gaussian(num_rows, num_columns, seed=0):
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) * 0.02


LAYERS = {
    "q_proj": _heavy_tailed(576, 576, seed=0),
    "k_proj": _heavy_tailed(192, 576, seed=1),
    "down_proj": _heavy_tailed(576, 1536, seed=2),
    "bfloat16": _heavy_tailed(192, 576, seed=3).bfloat16().float(),
    "gaussian": gaussian(192, 1536),
    "one_row": gaussian(1, 256),
    "zero": torch.zeros(16, 256),
    "tiny": gaussian(64, 256) * 1e-35,
    "huge": gaussian(64, 256) * 1e37,
    "far_apart": gaussian(64, 256) * torch.logspace(-30, 30, 64)[:, None],
}
