"""Pages of keys and values of some layers, and of the routes of all: write them, read them, copy them.

    k, v                 [L, num_pages + 1, page_tokens, K, H]; slot = page * page_tokens + offset
    k_scales, v_scales   fp32 [L, num_pages + 1, K, page_tokens], for FP8 only: one per token and head
    routes               uint8 [M, num_pages + 1, page_tokens, k]: the k experts of each token

The last page is written by rows that are not in use. Letters: L these layers, M all layers with
experts, K key/value heads, H head size, T tokens.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.cost.cache import FP8
from qerl.kernels.attention import fp8_pages
from qerl.kernels.attention.decode_attention import LayerCache
from qerl.models.architecture import Architecture, KVHeads

Spec = tuple[tuple[int, ...], torch.dtype]


def layers_by_heads(a: Architecture, layers: Sequence[int]) -> dict[KVHeads, tuple[int, ...]]:
    """Return the layers by their heads of keys and values; without layers, none by the first layer's."""
    by_heads: dict[KVHeads, tuple[int, ...]] = {} if layers else {a.kv_heads(a.kind(0)): ()}
    for layer in layers:
        heads = a.kv_heads(a.kind(layer))
        by_heads[heads] = (*by_heads.get(heads, ()), layer)
    return by_heads


def slots_of(pages_T: Tensor, positions_T: Tensor, page_tokens: int) -> Tensor:
    """Return the slots of positions that lie in these pages."""
    return pages_T * page_tokens + positions_T % page_tokens


def page_specs(
    heads: KVHeads, num_layers: int, num_pages: int, page_tokens: int, dtype: torch.dtype
) -> list[Spec]:
    """Return shapes and dtypes of k, v and, with FP8, their scales."""
    shape = (num_layers, num_pages + 1, page_tokens, heads.num)
    scales = (num_layers, num_pages + 1, heads.num, page_tokens)
    return [((*shape, heads.size), dtype)] * 2 + [(scales, torch.float32)] * (2 * (dtype == FP8))


def route_specs(a: Architecture, num_pages: int, page_tokens: int) -> list[Spec]:
    """Return shape and dtype of the routes of all layers with experts; without a mixture nothing."""
    if a.mixture is None:
        return []
    return [((len(a.layers_with_experts), num_pages + 1, page_tokens, a.mixture.num_chosen), torch.uint8)]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LayerPages:
    """LayerPages((0, 2), k, v): of layers 0 and 2."""

    layers: tuple[int, ...]
    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    routes: Tensor | None = None

    @property
    def num_pages(self) -> int:
        return self.k.shape[1] - 1

    @property
    def page_tokens(self) -> int:
        return self.k.shape[2]

    @property
    def unused_slot(self) -> int:
        return self.num_pages * self.page_tokens

    @property
    def tensors(self) -> list[Tensor]:
        tensors = (self.k, self.v, self.k_scales, self.v_scales, self.routes)
        return [t for t in tensors if t is not None]

    def layer(self, layer_index: int) -> LayerCache:
        place = self.layers.index(layer_index)
        return LayerCache(
            k=self.k[place],
            v=self.v[place],
            k_scales=None if self.k_scales is None else self.k_scales[place],
            v_scales=None if self.v_scales is None else self.v_scales[place],
        )

    def write(self, layer_index: int, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values; return (k_TKH, v_TKH) as the cache would return them, rounded if FP8."""
        of = self.layer(layer_index)
        if of.k_scales is not None and of.v_scales is not None:
            scales = of.k_scales, of.v_scales
            return fp8_pages.write((k_TKH, v_TKH), slots_T, (of.k, of.v), scales)
        for pages, x_TKH in ((of.k, k_TKH), (of.v, v_TKH)):
            pages.flatten(0, 1).index_copy_(0, slots_T, x_TKH)
        return k_TKH, v_TKH

    def readable(
        self, layer_index: int, tables_BX: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (k, v, tables): pages in this dtype, and block tables that index them."""
        of = self.layer(layer_index)
        if of.k_scales is None:
            return of.k, of.v, tables_BX
        pages = tables_BX.flatten()
        offsets = torch.arange(self.page_tokens, device=pages.device)
        slots = slots_of(pages[:, None], offsets, self.page_tokens).flatten()
        k, v = (x.view(-1, *of.k.shape[1:]) for x in self.rows(layer_index, slots, dtype))
        return k, v, torch.arange(len(pages), device=pages.device).view(tables_BX.shape)

    def rows(self, layer_index: int, slots_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (k_SKH, v_SKH) of these slots in this dtype."""
        rows, of = [], self.layer(layer_index)
        for pages, scales in ((of.k, of.k_scales), (of.v, of.v_scales)):
            pages = pages.flatten(0, 1)
            if scales is None:
                rows.append(pages[slots_S])
            else:
                codes = pages.view(torch.uint8)[slots_S].view(FP8)
                scales_SK = scales[slots_S // self.page_tokens, :, slots_S % self.page_tokens]
                rows.append(fp8_pages.from_fp8(codes, scales_SK).to(dtype))
        return rows[0], rows[1]

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages, (source, target) each, in all layers."""
        if not copies:
            return
        source, target = (torch.tensor(pages, device=self.k.device) for pages in zip(*copies, strict=True))
        for tensor in self.tensors:
            pages = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
            pages.index_copy_(1, target, pages.index_select(1, source))
