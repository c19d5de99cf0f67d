"""Router replay (R3, arXiv 2510.11370): the learner sends each row to the experts that the sampler chose.

Only the ids are replayed; the experts' weights are computed from the learner's own logits, so that the router
gets its gradient. Where rounding, noise or other kernels change a route, sampler and learner would otherwise
compute with different experts, which no importance weight repairs.

Replayed or not, the share of routes that the learner would have chosen otherwise is a metric.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from qerl.models.architecture import Architecture
from qerl.models.mixture import ExpertEnds


@dataclasses.dataclass(frozen=True, slots=True)
class RoutingReading:
    """Counts of one pass over a batch with routes."""

    counts_LE: Tensor
    """Rows of each expert in each layer with a mixture."""
    differs_TL: Tensor | None
    """True where the learner's own choice is not the sampler's; None if the latter is not known."""


class RouterReplay:
    """A Route of one pass. A layer that is computed twice, for its backward pass, has the same routes and
    counts once."""

    def __init__(self, a: Architecture, routes_T: Tensor | None, *, is_replayed: bool):
        """routes_T: of a PackedBatch."""
        assert a.mixture is not None
        self._num_experts, self._layers, self._is_replayed = (
            a.mixture.num_experts,
            a.layers_with_experts,
            is_replayed,
        )
        shape = -1, len(self._layers), a.mixture.num_chosen
        self._recorded_TLK = None if routes_T is None else routes_T.view(shape)
        self._used: dict[int, Tensor] = {}  # uint8
        self._differs: dict[int, Tensor] = {}

    def expert_ends(self) -> ExpertEnds:
        """Return the ends of each expert's rows in all layers, if they are replayed: the host waits for the
        device once in place of once a layer."""
        if self._recorded_TLK is None or not self._is_replayed:
            return {}
        recorded_LTK = self._recorded_TLK.transpose(0, 1)
        counts_LE = torch.stack([self._counted(ids_TK) for ids_TK in recorded_LTK])
        ends_LE = F.pad(counts_LE.cumsum(1), (1, 0)).tolist()
        return dict(zip(self._layers, ends_LE, strict=True))

    def __call__(self, layer_index: int, ids_TK: Tensor) -> Tensor:
        if layer_index in self._used:
            return self._used[layer_index].long()
        if self._recorded_TLK is not None:
            recorded_TK = self._recorded_TLK[:, self._layers.index(layer_index)].long()
            self._differs[layer_index] = (recorded_TK != ids_TK).any(1)
            ids_TK = recorded_TK if self._is_replayed else ids_TK
        self._used[layer_index] = ids_TK.to(torch.uint8)
        return ids_TK

    def reading(self) -> RoutingReading:
        counts_LE = torch.stack([self._counted(self._used[layer]) for layer in self._layers])
        differs = [self._differs[layer] for layer in self._layers if layer in self._differs]
        return RoutingReading(counts_LE, torch.stack(differs, 1) if differs else None)

    def _counted(self, ids_TK: Tensor) -> Tensor:
        """Return the rows of each expert. torch.bincount would wait for the device."""
        ids_S = ids_TK.flatten().long()
        return ids_S.new_zeros(self._num_experts).scatter_add_(0, ids_S, torch.ones_like(ids_S))
