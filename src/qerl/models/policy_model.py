"""Declare what adapters, learner and engines need of a model: our decoder (decoder.py), or a model that
transformers' code runs (transformers_model.py)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from qerl.aqn.noise_table import NoiseTable
from qerl.models.architecture import Architecture
from qerl.models.linear import QuantLinear
from qerl.models.mixture import ExpertLinear


class PolicyModel(Protocol):
    compute: torch.dtype
    device: torch.device
    noise_table: NoiseTable
    notices: Sequence[str]
    """Lines for the user about how the model was loaded."""
    name_prefix: str
    """Prefix of a linear's name in transformers' model: "model." or nothing."""
    family: str
    """Name of transformers' class."""
    vocab_size: int
    """Rows of the head: logits of a token."""
    max_positions: int

    @property
    def architecture(self) -> Architecture | None:
        """The description of our own decoder; None if transformers' code runs the model."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all frozen weights in their formats, without the adapter."""
        ...

    def linears(self) -> Iterator[tuple[str, QuantLinear]]:
        """Yield every linear that may have an adapter, with its name."""
        ...

    def expert_linears(self) -> Iterator[tuple[str, ExpertLinear]]:
        """Yield every stack of experts that may have adapters, with its name."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits, fp32 [T, V], of what the engine's forward passes return, without a gradient."""
        ...
