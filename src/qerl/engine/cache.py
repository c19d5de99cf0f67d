"""The KV cache: keys and values of every layer in pages that any sequence may own.

    k, v   [L, num_pages, page_tokens, K, H] in the compute dtype; slot = page * page_tokens + place in it

Zeros at first, for attention reads unused slots and weighs them with zero, which a NaN would survive.
Letters: L layers, K key/value heads, H head size, T tokens.
"""

import torch
from torch import Tensor

from qerl.model.architecture import Architecture


def page_bytes(architecture: Architecture, page_tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of one page in all layers."""
    a = architecture
    return 2 * a.num_layers * page_tokens * a.num_kv_heads * a.head_size * dtype.itemsize


class Cache:
    def __init__(
        self,
        architecture: Architecture,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        a = architecture
        shape = (a.num_layers, num_pages, page_tokens, a.num_kv_heads, a.head_size)
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, layer_index: int, slots_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        self.k[layer_index].flatten(0, 1).index_copy_(0, slots_T, k_TKH)
        self.v[layer_index].flatten(0, 1).index_copy_(0, slots_T, v_TKH)

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """In all layers."""
        source, target = (torch.tensor(pages, device=self.k.device) for pages in (sources, targets))
        for pages in (self.k, self.v):
            pages.index_copy_(1, target, pages.index_select(1, source))
