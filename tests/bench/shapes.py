"""A decoder small enough for a CPU."""

import dataclasses

from qerl.models.random_weights import SHAPES

TINY = dataclasses.replace(
    SHAPES["qwen2.5-7b"],
    num_layers=2,
    width=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    ff_width=192,
    vocab_size=97,
)
