"""Weights that are trained whole, beside adapters: the norms of every layer (adapter.train_norms).

    weight   what every pass and every kernel reads, in place: a recorded graph reads what is published
    full     its fp32 master, with the checkpoint's numbers: weight - Architecture.norm_offset
    base     the weight as it was loaded, for passes without the adapter

AQN adds its noise to the trained weight. PEFT calls such modules modules_to_save.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.models.decoder import Decoder, Layer
from qerl.models.norm import RMSNorm
from qerl.models.policy_model import PolicyModel

Module = NoisedRMSNorm | RMSNorm


class TrainedWeight(NamedTuple):
    """TrainedWeight("layers.0.input_layernorm", module, offset=0.0)"""

    name: str
    module: Module
    offset: float
    """The weight less the checkpoint's."""


def layer_norms(decoder: Decoder) -> Iterator[TrainedWeight]:
    """Yield the norms of each layer on the residual stream or before it; not those of heads, nor the last."""
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        for name in layer.norms.names:
            norm = getattr(layer, name)
            assert isinstance(norm, Module)
            yield TrainedWeight(f"layers.{index}.{name}", norm, decoder.architecture.norm_offset)


def learn_norms(decoder: Decoder) -> None:
    """Create a master of every layer's norms."""
    for _, norm, offset in layer_norms(decoder):
        norm.base = norm.weight.clone()
        norm.full = nn.Parameter(norm.weight - offset)


def trained_weights(decoder: PolicyModel) -> list[TrainedWeight]:
    """Return those that have a master."""
    all_weights = layer_norms(decoder) if isinstance(decoder, Decoder) else ()
    return [each for each in all_weights if each.module.full is not None]


@torch.no_grad()
def publish_weights(decoder: PolicyModel) -> None:
    """Copy the masters into the weights."""
    for _, module, offset in trained_weights(decoder):
        if module.full is not None:
            torch.add(module.full, offset, out=module.weight)


@contextlib.contextmanager
def replaced_weights(weights: dict[Module, Tensor]) -> Iterator[None]:
    """Let these modules read other weights within the context."""
    before = [(module, module.weight) for module in weights]
    try:
        for module, weight in weights.items():
            module.weight = weight
        yield
    finally:
        for module, weight in before:
            module.weight = weight


def base_weights(decoder: PolicyModel) -> dict[Module, Tensor]:
    """Return the weights of trained modules as they were loaded."""
    trained = [module for _, module, _ in trained_weights(decoder)]
    return {module: module.base for module in trained if module.base is not None}


@torch.no_grad()
def weight_shifts(decoder: PolicyModel) -> dict[str, Tensor]:
    """Return how far the trained weights have moved, |w - base| / |base| over all of a kind, for metrics."""
    pairs = [(module.weight, base) for module, base in base_weights(decoder).items()]
    if not pairs:
        return {}
    moved, before = (
        torch.nn.utils.get_total_norm(parts)
        for parts in ([weight - base for weight, base in pairs], [base for _, base in pairs])
    )
    return {"norms_shift": moved / before}
