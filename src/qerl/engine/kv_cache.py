"""The KV cache: keys and values of every layer in pages that any sequence may own.

    k, v                 [L, num_pages, page_tokens, K, H]; slot = page * page_tokens + place in it
    k_scales, v_scales   fp32 [L, num_pages, page_tokens, K], in FP8 only: one for each token and head

In the compute dtype, or in FP8 (E4M3 with those scales). Zeros at first, for attention reads unused slots and
weighs them with zero, which a NaN would survive. One page more than anyone may take is where rows that are
not in use write. Letters: L layers, K key/value heads, H head size, T tokens.

On a GPU the memory is there inside `present` alone, and zero each time; outside it learning has it
(kernels/virtual_memory.py). All tensors lie in one range of addresses.
"""

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from qerl.kernels.decode_attention import LayerCache, from_fp8, to_fp8
from qerl.kernels.virtual_memory import memory_on
from qerl.models.architecture import Architecture

FP8 = torch.float8_e4m3fn
_ALIGNMENT = 256  # bytes, as of torch's own tensors


def page_bytes(architecture: Architecture, page_tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of one page in all layers, their scales included."""
    a = architecture
    head_bytes = a.head_size * dtype.itemsize + (4 if dtype == FP8 else 0)
    return 2 * a.num_layers * page_tokens * a.num_kv_heads * head_bytes


def slots_of(pages_T: Tensor, positions_T: Tensor, page_tokens: int) -> Tensor:
    """Of positions that lie in these pages."""
    return pages_T * page_tokens + positions_T % page_tokens


class KVCache:
    def __init__(
        self,
        architecture: Architecture,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        a = architecture
        shape = (a.num_layers, num_pages + 1, page_tokens, a.num_kv_heads)
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.unused_slot = num_pages * page_tokens
        wanted = [((*shape, a.head_size), dtype)] * 2 + [(shape, torch.float32)] * (2 * (dtype == FP8))
        places, end = [], 0
        for each, each_dtype in wanted:
            places.append((end, each, each_dtype))
            end += -(-math.prod(each) * each_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._memory = memory_on(device, end)
        with self.present():
            bytes_N = self._memory.tensor()
            tensors = [
                bytes_N[start : start + math.prod(each) * each_dtype.itemsize].view(each_dtype).view(each)
                for start, each, each_dtype in places
            ]
        self.k, self.v = tensors[:2]
        self.k_scales, self.v_scales = tensors[2:] or (None, None)

    def present(self) -> AbstractContextManager[None]:
        """Inside, the pages may be used. torch.OutOfMemoryError if there is no room for them."""
        return self._memory.present()

    @property
    def num_bytes(self) -> int:
        """While it is present."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def held_bytes(self) -> int:
        """Of the device's memory while it is not present."""
        return self.num_bytes if self._memory.is_kept else 0

    def layer(self, layer_index: int) -> LayerCache:
        return LayerCache(
            k=self.k[layer_index],
            v=self.v[layer_index],
            k_scales=None if self.k_scales is None else self.k_scales[layer_index],
            v_scales=None if self.v_scales is None else self.v_scales[layer_index],
        )

    def write(self, layer_index: int, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """(k_TKH, v_TKH) as they can be read again."""
        dtype, kept = k_TKH.dtype, []
        for pages, scales, x_TKH in ((self.k, self.k_scales, k_TKH), (self.v, self.v_scales, v_TKH)):
            if scales is not None:
                x_TKH, scales_TK = to_fp8(x_TKH)
                scales[layer_index].flatten(0, 1).index_copy_(0, slots_T, scales_TK)
                kept.append(from_fp8(x_TKH, scales_TK).to(dtype))
                # torch copies no FP8 by index: its bytes
                pages[layer_index].view(torch.uint8).flatten(0, 1).index_copy_(
                    0, slots_T, x_TKH.view(torch.uint8)
                )
            else:
                pages[layer_index].flatten(0, 1).index_copy_(0, slots_T, x_TKH)
                kept.append(x_TKH)
        return kept[0], kept[1]

    def readable(
        self, layer_index: int, tables_BX: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, tables): pages in this dtype, and where in them those of the tables lie."""
        k, v = self.k[layer_index], self.v[layer_index]
        if self.k_scales is None or self.v_scales is None:
            return k, v, tables_BX
        pages = tables_BX.flatten()
        places = torch.arange(self.page_tokens, device=pages.device)
        slots = slots_of(pages[:, None], places, self.page_tokens).flatten()
        k, v = (x.view(-1, *k.shape[1:]) for x in self.rows(layer_index, slots, dtype))
        return k, v, torch.arange(len(pages), device=pages.device).view(tables_BX.shape)

    def rows(self, layer_index: int, slots_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(k_SKH, v_SKH) of these slots in this dtype."""
        found = []
        for pages, scales in ((self.k, self.k_scales), (self.v, self.v_scales)):
            pages = pages[layer_index].flatten(0, 1)
            if scales is None:
                found.append(pages[slots_S])
            else:
                codes = pages.view(torch.uint8)[slots_S].view(FP8)
                found.append(from_fp8(codes, scales[layer_index].flatten(0, 1)[slots_S]).to(dtype))
        return found[0], found[1]

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """In all layers."""
        source, target = (torch.tensor(pages, device=self.k.device) for pages in (sources, targets))
        for tensor in self._tensors():
            pages = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
            pages.index_copy_(1, target, pages.index_select(1, source))

    def _tensors(self) -> list[Tensor]:
        return [t for t in (self.k, self.v, self.k_scales, self.v_scales) if t is not None]
