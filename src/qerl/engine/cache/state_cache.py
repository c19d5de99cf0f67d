"""Recurrent states of the layers with Gated DeltaNet, in slots that prompts and samples own.

    conv     [L, num_slots, W - 1, C]    compute dtype    last inputs of the short convolution
    state    [L, num_slots, N, H, V]     fp32             state of the delta rule

A slot has the states of one sequence in all these layers, which take no pages. Rows that are not in use read
and write one extra slot. Memory as of the pages (kv_cache.py). Letters: L layers with states, the others as
in kernels/delta_net/gated_delta_net.py.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from qerl.engine.cache.memory import tensors_on
from qerl.kernels.delta_net.gated_delta_net import DeltaState
from qerl.models.architecture import Architecture


class StateCache:
    def __init__(
        self, architecture: Architecture, num_slots: int, compute: torch.dtype, device: torch.device
    ):
        shape = architecture.delta
        assert shape is not None
        self.num_slots, self.unused_slot = num_slots, num_slots
        self._places = {layer: place for place, layer in enumerate(architecture.layers_with("delta"))}
        size = len(self._places), num_slots + 1
        specs = [((*size, *shape.conv_shape), compute), ((*size, *shape.state_shape), torch.float32)]
        self._memory, (self.conv, self.state) = tensors_on(device, specs)

    def present(self) -> AbstractContextManager[None]:
        """Allocate the slots inside the context. Raise torch.OutOfMemoryError if memory is too short."""
        return self._memory.present()

    @property
    def num_bytes(self) -> int:
        return self.conv.nbytes + self.state.nbytes

    def of_layer(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """Return views of the slots of one layer, [num_slots + 1, W - 1, C] and [num_slots + 1, N, H, V]."""
        place = self._places[layer_index]
        return self.conv[place], self.state[place]

    def read(self, layer_index: int, slots_S: Tensor, is_new_S: Tensor | None = None) -> DeltaState:
        """Return copies of these slots; zeros where is_new_S, at the start of a sequence."""
        copies = [tensor[slots_S] for tensor in self.of_layer(layer_index)]
        if is_new_S is not None:
            copies = [x.masked_fill(is_new_S.view(-1, *[1] * (x.dim() - 1)), 0) for x in copies]
        return DeltaState(*copies)

    def write(self, layer_index: int, slots_S: Tensor, state: DeltaState) -> None:
        for tensor, x in zip(self.of_layer(layer_index), state, strict=True):
            tensor.index_copy_(0, slots_S, x)

    def copy(self, pairs: list[tuple[list[int], list[int]]]) -> None:
        """Copy the states of each first slot to the second."""
        if pairs:
            sources, targets = (
                torch.tensor([slot for (slot,) in side], device=self.state.device)
                for side in zip(*pairs, strict=True)
            )
            for tensor in (self.conv, self.state):
                tensor.index_copy_(1, targets, tensor.index_select(1, sources))
