"""Paged KV cache: keys and values of every layer, in pages that any sequence may own.

    pages      those of all layers with attention; layer_pages.py has their layout
    windowed   those of the layers with a window, if these have pages of their own: `pages` has the others

A sample keeps its `pages` while it runs, so they also hold the routes of a mixture of experts, of all layers:
prefixes and branches share them as they share keys.

The dtype is the compute dtype or FP8 (E4M3 with scales). Pages start as zeros, because attention reads unused
slots with weight zero, which a NaN would survive. Layers with recurrent states have slots in `states`
(state_cache.py) instead.

On a GPU the memory is allocated, and zeroed, inside `present` only; outside it the learner uses it
(kernels/runtime/virtual_memory.py). All tensors lie in one address range, and the states in another.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from qerl.engine.cache.layer_pages import LayerPages, layers_by_heads, page_specs, route_specs, slots_of
from qerl.engine.cache.memory import tensors_on
from qerl.engine.cache.state_cache import StateCache
from qerl.engine.schedule.cache_space import HasPages, Space
from qerl.engine.schedule.carried_cache import CachedSpan, CarriedCache, HostPieces
from qerl.engine.schedule.window_pages import windowed_layers
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.runtime.gpu_memory import sent
from qerl.models.architecture import Architecture
from qerl.models.mixture import Route


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
        host: HostPieces | None = None,
    ):
        """states: None unless layers have recurrent states. num_window_pages: of layers with a window; None:
        they use the pages of the others. host: memory for carried contents; None: the cache makes its own."""
        a = architecture
        self.states, self.page_tokens = states, page_tokens
        self._host = HostPieces(device) if host is None else host
        apart = set() if num_window_pages is None else set(windowed_layers(a))
        whole = [i for i in a.layers_with("attention") if i not in apart]
        kinds = [(heads, layers, num_pages) for heads, layers in layers_by_heads(a, whole).items()]
        if apart:
            ((heads, layers),) = layers_by_heads(a, sorted(apart)).items()
            kinds.append((heads, layers, num_window_pages or 0))
        specs = [page_specs(heads, len(layers), n, page_tokens, dtype) for heads, layers, n in kinds]
        of_routes = route_specs(a, num_pages, page_tokens)
        self._memory, tensors = tensors_on(device, [*itertools.chain(*specs), *of_routes])
        routes, rest = tensors.pop() if of_routes else None, iter(tensors)
        each = [LayerPages(layers, *itertools.islice(rest, len(specs[0]))) for _, layers, _ in kinds]
        self.windowed = each.pop() if apart else None
        self.pages = dataclasses.replace(each[0], routes=routes)
        self._others = each[1:]  # of layers with other heads, with the same tables
        self._of_layer = {i: pages for pages in self._kinds for i in pages.layers}
        self._route_places = {layer: place for place, layer in enumerate(a.layers_with_experts)}

    @property
    def _kinds(self) -> list[LayerPages]:
        return [self.pages, *self._others, *(() if self.windowed is None else (self.windowed,))]

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Allocate the pages inside the context. Raise torch.OutOfMemoryError if memory is too short."""
        with self._memory.present(), contextlib.ExitStack() as stack:
            if self.states is not None:
                stack.enter_context(self.states.present())
            yield

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def space(self) -> Space:
        windowed = 0 if self.windowed is None else self.windowed.num_pages
        return Space(self.num_pages, windowed, 0 if self.states is None else self.states.num_slots)

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

    def state_of(self, layer_index: int, state: DecodeState) -> DecodeState:
        """Return the state with the tables of the pages that this layer uses."""
        if self.of_layer(layer_index) is not self.windowed:
            return state
        return dataclasses.replace(state, tables_BX=state.window_tables_BX)

    def recording(self, slots_T: Tensor) -> Route | None:
        """Return a route that writes the experts of the rows to these slots of `pages`; None without a
        mixture."""
        if self.pages.routes is None:
            return None
        routes = self.pages.routes

        def record(layer_index: int, ids_TK: Tensor) -> Tensor:
            place = self._route_places[layer_index]
            routes[place].flatten(0, 1).index_copy_(0, slots_T, ids_TK.to(torch.uint8))
            return ids_TK

        return record

    def routes_of(self, layer_index: int) -> Tensor:
        """Return where `pages` hold the experts of a layer, uint8 [pages, page_tokens, k]."""
        assert self.pages.routes is not None
        return self.pages.routes[self._route_places[layer_index]]

    def read_routes(self, pages: list[int], num_positions: int) -> bytes | None:
        """Return the experts of the first positions in these pages, as in Sample; None without a mixture."""
        routes = self.pages.routes
        if routes is None:
            return None
        table, positions = torch.tensor(pages), torch.arange(num_positions)
        slots = slots_of(table[positions // self.page_tokens], positions, self.page_tokens)
        rows_LTK = routes.flatten(1, 2)[:, slots.to(routes.device)]
        return rows_LTK.transpose(0, 1).contiguous().cpu().numpy().tobytes()

    def carry(self, spans: list[CachedSpan]) -> list[CarriedCache | None]:
        """Return copies of the spans' contents in host memory; None where it has too little room."""
        carried = []
        for span in spans:
            places, windowed = list(span.windowed), list(span.windowed.values())
            selected = self._selected(span.own_pages(self.page_tokens), windowed, span.slot)
            carried.append(CarriedCache.of(self._host, selected, places))
        if self.pages.k.is_cuda:
            torch.cuda.current_stream(self.pages.k.device).synchronize()
        return carried

    def restore(self, carried: CarriedCache, span: CachedSpan) -> None:
        """Write the contents of a span of the same positions; window pages where this span has them too."""
        rows = [row for row, place in enumerate(carried.places) if place in span.windowed]
        windowed = [span.windowed[carried.places[row]] for row in rows]
        selected = self._selected(span.own_pages(self.page_tokens), windowed, span.slot)
        for (x, indices), copy in zip(selected, carried.contents(self.pages.k.device), strict=True):
            if copy.shape[1] > len(indices):  # it held more pages of a window
                copy = copy.index_select(1, self._indices(rows))
            x.view(torch.uint8).index_copy_(1, indices, copy)

    def _selected(
        self, pages: list[int], windowed: list[int], slot: list[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each tensor of the cache with its indices in the second dimension: pages or slots."""
        whole = [x for kind in (self.pages, *self._others) for x in kind.tensors]
        of_windows = [] if self.windowed is None else self.windowed.tensors
        states = [] if self.states is None else [self.states.conv, self.states.state]
        selected = []
        for tensors, places in ((whole, pages), (of_windows, windowed), (states, slot)):
            if tensors:
                indices = self._indices(places)
                selected += [(x, indices) for x in tensors]
        return selected

    def _indices(self, places: list[int]) -> Tensor:
        return sent(torch.tensor(places, dtype=torch.long), self.pages.k.device)

    def copy_partial_pages(self, copies: list[tuple[int, HasPages, HasPages]]) -> None:
        """For each (num_positions, source, target), copy the page that num_positions fill partly, if any; the
        window page where both hold it."""
        places = [
            (n // self.page_tokens, source, target) for n, source, target in copies if n % self.page_tokens
        ]
        for pages in (self.pages, *self._others):
            pages.copy_pages([(source.pages[i], target.pages[i]) for i, source, target in places])
        if self.windowed is not None:
            each = [(i, source.window_pages, target.window_pages) for i, source, target in places]
            self.windowed.copy_pages([(a[i], b[i]) for i, a, b in each if i in a and i in b])
