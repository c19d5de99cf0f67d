"""Paged KV cache: keys and values of every layer, in pages that any sequence may own.

    pages      those of all layers with attention; layer_pages.py has their layout
    windowed   those of the layers with a window, if these have pages of their own: `pages` has the others

The dtype is the compute dtype or FP8 (E4M3 with scales). Pages start as zeros, because attention reads unused
slots with weight zero, which a NaN would survive. Layers with recurrent states have slots in `states`
(state_cache.py) instead.

On a GPU the memory is allocated, and zeroed, inside `present` only; outside it the learner uses it
(kernels/virtual_memory.py). All tensors lie in one address range, and the states in another.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from qerl.engine.cache_memory import tensors_on
from qerl.engine.layer_pages import FP8, LayerPages, page_bytes, page_specs, slots_of
from qerl.engine.state_cache import StateCache
from qerl.engine.window_pages import windowed_layers
from qerl.kernels.decode_attention import LayerCache
from qerl.kernels.decode_state import DecodeState
from qerl.models.architecture import Architecture

__all__ = ["FP8", "KVCache", "page_bytes", "slots_of"]


class KVCache:
    def __init__(
        self,
        architecture: Architecture,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
        num_window_pages: int | None = None,
    ):
        """states: of a decoder whose layers have recurrent states. num_window_pages: of layers with a window;
        None: they use the same pages as the others."""
        a = architecture
        self.states, self.page_tokens = states, page_tokens
        apart = set() if num_window_pages is None else set(windowed_layers(a))
        layers = tuple(i for i in a.layers_with("attention") if i not in apart)
        specs = page_specs(a, len(layers), num_pages, page_tokens, dtype)
        num_tensors = len(specs)
        specs += page_specs(a, len(apart), num_window_pages or 0, page_tokens, dtype) if apart else []
        self._memory, tensors = tensors_on(device, specs)
        self.pages = LayerPages(layers, *tensors[:num_tensors])
        self.windowed = LayerPages(tuple(sorted(apart)), *tensors[num_tensors:]) if apart else None
        self._of_layer = {i: pages for pages in self._kinds for i in pages.layers}

    @property
    def _kinds(self) -> list[LayerPages]:
        return [self.pages] if self.windowed is None else [self.pages, self.windowed]

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Allocate the pages inside the context. Raise torch.OutOfMemoryError if memory is too short."""
        with self._memory.present(), contextlib.ExitStack() as stack:
            if self.states is not None:
                stack.enter_context(self.states.present())
            yield

    @property
    def k(self) -> Tensor:
        return self.pages.k

    @property
    def v(self) -> Tensor:
        return self.pages.v

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def num_window_pages(self) -> int:
        return 0 if self.windowed is None else self.windowed.num_pages

    @property
    def num_state_slots(self) -> int:
        return 0 if self.states is None else self.states.num_slots

    @property
    def num_bytes(self) -> int:
        """Size of the cache while it is present."""
        states = 0 if self.states is None else self.states.num_bytes
        return states + sum(tensor.nbytes for pages in self._kinds for tensor in pages.tensors)

    @property
    def resident_bytes(self) -> int:
        """Device memory that the cache keeps while it is not present."""
        return self.num_bytes if self._memory.is_kept else 0

    def of_layer(self, layer_index: int) -> LayerPages:
        """Return the pages that this layer uses."""
        return self._of_layer[layer_index]

    def layer(self, layer_index: int) -> LayerCache:
        return self.of_layer(layer_index).layer(layer_index)

    def state_of(self, layer_index: int, state: DecodeState) -> DecodeState:
        """Return the state with the tables of the pages that this layer uses."""
        if self.of_layer(layer_index) is self.pages:
            return state
        return dataclasses.replace(state, tables_BX=state.window_tables_BX)

    def copy_partial_pages(self, copies: list[tuple[int, list[int], list[int]]]) -> None:
        """For each (num_positions, source pages, target pages), copy the page that num_positions fill
        partly, if there is one."""
        places = [
            (n // self.page_tokens, source, target) for n, source, target in copies if n % self.page_tokens
        ]
        self.pages.copy_pages([(source[i], target[i]) for i, source, target in places])

    def copy_partial_window(self, copies: list[tuple[int, dict[int, int], dict[int, int]]]) -> None:
        """Like copy_partial_pages, of the windows' pages; where both hold the page."""
        places = [
            (n // self.page_tokens, source, target) for n, source, target in copies if n % self.page_tokens
        ]
        if self.windowed is not None:
            self.windowed.copy_pages(
                [(source[i], target[i]) for i, source, target in places if i in source and i in target]
            )
