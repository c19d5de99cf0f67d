"""Paged KV cache: keys and values of every layer, in pages that any sequence may own.

    k, v                 [L, num_pages, page_tokens, K, H]; slot = page * page_tokens + offset
    k_scales, v_scales   fp32 [L, num_pages, page_tokens, K], for FP8 only: one per token and head

The dtype is the compute dtype or FP8 (E4M3 with these scales). Pages start as zeros, because attention reads
unused slots with weight zero, which a NaN would survive. Rows that are not in use write to one extra page.
Letters: L layers, K key/value heads, H head size, T tokens.

Only layers with attention have pages; those with recurrent states have slots in `states` (state_cache.py).

On a GPU the memory is allocated, and zeroed, inside `present` only; outside it the learner uses it
(kernels/virtual_memory.py). All tensors lie in one address range, and the states in another.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from qerl.engine.cache_memory import tensors_on
from qerl.engine.state_cache import StateCache
from qerl.kernels.decode_attention import LayerCache, from_fp8, to_fp8
from qerl.models.architecture import Architecture

FP8 = torch.float8_e4m3fn


def page_bytes(architecture: Architecture, page_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page in all layers with attention: keys, values and their scales."""
    a = architecture
    head_bytes = a.head_size * dtype.itemsize + (4 if dtype == FP8 else 0)
    return 2 * len(a.layers_with("attention")) * page_tokens * a.num_kv_heads * head_bytes


def slots_of(pages_T: Tensor, positions_T: Tensor, page_tokens: int) -> Tensor:
    """Return the slots of positions that lie in these pages."""
    return pages_T * page_tokens + positions_T % page_tokens


class KVCache:
    def __init__(
        self,
        architecture: Architecture,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StateCache | None = None,
    ):
        """states: of a decoder whose layers have recurrent states."""
        a = architecture
        self.states = states
        self._places = {layer: place for place, layer in enumerate(a.layers_with("attention"))}
        shape = (len(self._places), num_pages + 1, page_tokens, a.num_kv_heads)
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.unused_slot = num_pages * page_tokens
        specs = [((*shape, a.head_size), dtype)] * 2 + [(shape, torch.float32)] * (2 * (dtype == FP8))
        self._memory, tensors = tensors_on(device, specs)
        self.k, self.v = tensors[:2]
        self.k_scales, self.v_scales = tensors[2:] or (None, None)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Allocate the pages inside the context. Raise torch.OutOfMemoryError if memory is too short."""
        with self._memory.present(), contextlib.ExitStack() as stack:
            if self.states is not None:
                stack.enter_context(self.states.present())
            yield

    @property
    def num_state_slots(self) -> int:
        return 0 if self.states is None else self.states.num_slots

    @property
    def num_bytes(self) -> int:
        """Size of the cache while it is present."""
        states = 0 if self.states is None else self.states.num_bytes
        return states + sum(tensor.nbytes for tensor in self._tensors())

    @property
    def resident_bytes(self) -> int:
        """Device memory that the cache keeps while it is not present."""
        return self.num_bytes if self._memory.is_kept else 0

    def layer(self, layer_index: int) -> LayerCache:
        place = self._places[layer_index]
        return LayerCache(
            k=self.k[place],
            v=self.v[place],
            k_scales=None if self.k_scales is None else self.k_scales[place],
            v_scales=None if self.v_scales is None else self.v_scales[place],
        )

    def write(self, layer_index: int, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values; return (k_TKH, v_TKH) as the cache would return them, rounded if FP8."""
        dtype, stored, place = k_TKH.dtype, [], self._places[layer_index]
        for pages, scales, x_TKH in ((self.k, self.k_scales, k_TKH), (self.v, self.v_scales, v_TKH)):
            if scales is not None:
                x_TKH, scales_TK = to_fp8(x_TKH)
                scales[place].flatten(0, 1).index_copy_(0, slots_T, scales_TK)
                stored.append(from_fp8(x_TKH, scales_TK).to(dtype))
                # as bytes, because index_copy_ does not take FP8
                pages[place].view(torch.uint8).flatten(0, 1).index_copy_(0, slots_T, x_TKH.view(torch.uint8))
            else:
                pages[place].flatten(0, 1).index_copy_(0, slots_T, x_TKH)
                stored.append(x_TKH)
        return stored[0], stored[1]

    def readable(
        self, layer_index: int, tables_BX: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (k, v, tables): pages in this dtype, and block tables that index them."""
        place = self._places[layer_index]
        k, v = self.k[place], self.v[place]
        if self.k_scales is None or self.v_scales is None:
            return k, v, tables_BX
        pages = tables_BX.flatten()
        offsets = torch.arange(self.page_tokens, device=pages.device)
        slots = slots_of(pages[:, None], offsets, self.page_tokens).flatten()
        k, v = (x.view(-1, *k.shape[1:]) for x in self.rows(layer_index, slots, dtype))
        return k, v, torch.arange(len(pages), device=pages.device).view(tables_BX.shape)

    def rows(self, layer_index: int, slots_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (k_SKH, v_SKH) of these slots in this dtype."""
        rows, place = [], self._places[layer_index]
        for pages, scales in ((self.k, self.k_scales), (self.v, self.v_scales)):
            pages = pages[place].flatten(0, 1)
            if scales is None:
                rows.append(pages[slots_S])
            else:
                codes = pages.view(torch.uint8)[slots_S].view(FP8)
                rows.append(from_fp8(codes, scales[place].flatten(0, 1)[slots_S]).to(dtype))
        return rows[0], rows[1]

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages in all layers."""
        source, target = (torch.tensor(pages, device=self.k.device) for pages in (sources, targets))
        for tensor in self._tensors():
            pages = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
            pages.index_copy_(1, target, pages.index_select(1, source))

    def copy_partial_pages(self, copies: list[tuple[int, list[int], list[int]]]) -> None:
        """For each (num_positions, source pages, target pages), copy the page that num_positions fill
        partly, if there is one."""
        last = [
            (source, target, n // self.page_tokens) for n, source, target in copies if n % self.page_tokens
        ]
        if last:
            self.copy_pages([source[i] for source, _, i in last], [target[i] for _, target, i in last])

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.k, self.v, self.k_scales, self.v_scales) if t is not None]
