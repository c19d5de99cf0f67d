"""Router replay (R3, arXiv 2510.11370): the learner sends each row to the experts that the sampler chose.

Only the ids are replayed; the experts' weights are computed from the learner's own logits, so that the router
gets its gradient. Where rounding, noise or other kernels change a route, sampler and learner would otherwise
compute with different experts, which no importance weight repairs.

Replayed or not, the share of routes that the learner would have chosen otherwise is a metric.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from qerl.kernels.experts.expert_product import RowEnds
from qerl.kernels.experts.routing import sort_layers
from qerl.models.architecture import Architecture
from qerl.models.mixture import ChosenRows, RowsByLayer


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
        self._num_experts, self._layers = a.mixture.num_experts, a.layers_with_experts
        shape = -1, len(self._layers), a.mixture.num_chosen
        self._recorded: dict[int, Tensor] = {}
        if routes_T is not None:
            self._recorded = dict(zip(self._layers, routes_T.view(shape).unbind(1), strict=True))
        self._used = dict(self._recorded) if is_replayed else {}
        self._preferred: dict[int, Tensor] = {}  # the learner's choices, to be compared all at once

    def rows_by_layer(self) -> RowsByLayer:
        """Return the routes of all layers, if they are replayed: they are sorted at once, and the host waits
        for the device once in place of once a layer."""
        if not self._used:
            return {}
        ids_LTK = torch.stack([self._used[layer] for layer in self._layers])
        each = sort_layers(ids_LTK.flatten(1), ids_LTK.shape[2], self._num_experts)
        ends_LE = torch.stack([rows.offsets for rows in each]).tolist()
        parts = zip(self._layers, ids_LTK.long(), each, ends_LE, strict=True)
        return {layer: ChosenRows(ids, rows, RowEnds(ends), False) for layer, ids, rows, ends in parts}

    def __call__(self, layer_index: int, ids_TK: Tensor) -> Tensor:
        if layer_index in self._recorded and layer_index not in self._preferred:
            self._preferred[layer_index] = ids_TK.to(torch.uint8)
        if layer_index not in self._used:
            self._used[layer_index] = ids_TK.to(torch.uint8)
        return self._used[layer_index].long()

    def reading(self) -> RoutingReading:
        """Return the counts of a pass that has been through all layers."""
        differs_TL = None
        if self._preferred:
            preferred, recorded = (
                [of[x] for x in self._layers if x in self._preferred]
                for of in (self._preferred, self._recorded)
            )
            differs_TL = (torch.stack(preferred, 1) != torch.stack(recorded, 1)).any(2)
        return RoutingReading(self._counts_LE, differs_TL)

    @functools.cached_property
    def _counts_LE(self) -> Tensor:
        """The rows of each expert, once all routes are known. torch.bincount would wait for the device."""
        ids_LS = torch.stack([self._used[layer] for layer in self._layers]).flatten(1).long()
        counts_LE = ids_LS.new_zeros(len(ids_LS), self._num_experts)
        return counts_LE.scatter_add_(1, ids_LS, torch.ones_like(ids_LS))
