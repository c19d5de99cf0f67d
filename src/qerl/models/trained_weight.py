"""Weights that are trained whole, beside adapters: the norms of every layer (adapter.train_norms), the
embedding and the head (adapter.modules_to_save).

    weight   what every pass and every kernel reads, in place: a recorded graph reads what is published
    full     its fp32 master, with the checkpoint's numbers: of norms weight - Architecture.norm_offset
    base     the weight as it was loaded, for passes without the adapter

AQN adds its noise to the trained weight. PEFT calls such modules modules_to_save.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qerl.aqn.noised_norm import NoisedRMSNorm
from qerl.config import AdapterConfig
from qerl.errors import UserError
from qerl.models.decoder import Decoder, Layer
from qerl.models.linear import FrozenWeight
from qerl.models.lm_head import LMHead
from qerl.models.norm import RMSNorm
from qerl.models.policy_model import PolicyModel

Norm = NoisedRMSNorm | RMSNorm
Module = Norm | FrozenWeight | LMHead
TABLES = "embed_tokens", "lm_head"


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
            assert isinstance(norm, Norm)
            yield TrainedWeight(f"layers.{index}.{name}", norm, decoder.architecture.norm_offset)


def tables(decoder: Decoder, names: Collection[str]) -> Iterator[TrainedWeight]:
    """Yield the embedding and the head, if they are named."""
    for name, module in zip(TABLES, (decoder.embed_tokens, decoder.lm_head), strict=True):
        if name in names:
            yield TrainedWeight(name, module, offset=0.0)


def wholes_of(decoder: Decoder, config: AdapterConfig) -> list[TrainedWeight]:
    """Return what an adapter of this config trains whole."""
    norms = layer_norms(decoder) if config.train_norms else ()
    return [*norms, *tables(decoder, config.modules_to_save)]


def learn_wholes(decoder: Decoder, config: AdapterConfig) -> None:
    """Create the masters. Raise UserError for a table that is tied to the other one."""
    names = config.modules_to_save
    if names and decoder.architecture.tied_head:
        raise UserError(
            f"adapter.modules_to_save {' '.join(names)}: the head of this model is tied to its embedding;"
            " they are trained whole only where they are not"
        )
    for _, module, offset in wholes_of(decoder, config):
        weight = module.weight
        assert weight is not None, "a packed head: conflicts.py"
        module.base = weight.clone()
        module.full = nn.Parameter(weight.float() - offset)


def trained_weights(decoder: PolicyModel) -> list[TrainedWeight]:
    """Return those that have a master."""
    if not isinstance(decoder, Decoder):
        return []
    each = [*layer_norms(decoder), *tables(decoder, TABLES)]
    return [weight for weight in each if weight.module.full is not None]


@torch.no_grad()
def publish_weights(decoder: PolicyModel) -> None:
    """Copy the masters into the weights."""
    for _, module, offset in trained_weights(decoder):
        if module.full is not None and module.weight is not None:
            module.weight.copy_(module.full + offset if offset else module.full)


@contextlib.contextmanager
def replaced_weights(weights: dict[Module, Tensor]) -> Iterator[None]:
    """Let these modules read other weights within the context."""
    before = [(module, module.weight) for module in weights if module.weight is not None]
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
    weights = trained_weights(decoder)
    shifts = {}
    for kind in ("norms", "embed_tokens", "lm_head"):
        some = [each for each in weights if (each.name if each.name in TABLES else "norms") == kind]
        if some:
            shifts[f"{kind}_shift"] = _shift(some)
    return shifts


def _shift(weights: list[TrainedWeight]) -> Tensor:
    """Compare masters: a weight in 16 bits moves in steps."""
    moved, before = [], []
    for _, module, offset in weights:
        if module.full is not None and module.base is not None:
            moved.append((module.full + offset).sub_(module.base).norm())
            before.append(torch.linalg.vector_norm(module.base, dtype=torch.float32))
    return torch.stack(moved).norm() / torch.stack(before).norm()
