"""Keys and values of the layers with a window in one forward of a prefill.

    a span's keys   [the window before its first row | its own rows]
    before it       read from the pages of the sequence, or of its prompt; carried if the last forward cut the
                    chunk, because pages hold only what queries after the whole chunk see
    its own rows    used as computed, rounded as the pages round; written where there is a page, else to the
                    unused one

So a prefill of any length needs no more pages of these layers than its last window. The rows see the same
keys in the same blocks as with all keys in pages: the same bits (tests/engine/schedule/test_window_pages.py).
"""

import dataclasses

import torch
from torch import Tensor

from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.cache.layer_pages import slots_of
from qerl.engine.prefill.chunk import PrefillChunk
from qerl.engine.schedule.window_pages import Window
from qerl.kernels.attention.attention import PagedLayout
from qerl.kernels.attention.flash_attention import SequenceEnds
from qerl.kernels.runtime.gpu_memory import sent

Carried = dict[int, tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WindowedForward:
    layers: frozenset[int]
    layout: PagedLayout
    """Layout of the spans, whose key rows are those of `keys`."""
    carried: Carried | None
    """By layer, filled by `keys`: the last window of the last chunk, if it goes on in the next forward."""
    _cache: KVCache
    _before: Carried | None
    _read_slots: Tensor  # of the keys before the spans that pages have
    _order: Tensor | None  # of the key rows among those read, carried and written; None: the written ones
    _write_slots_T: Tensor
    _num_carried: int  # key rows to carry on

    @classmethod
    def of(
        cls,
        cache: KVCache,
        window: Window | None,
        chunks: list[PrefillChunk],
        carried: Carried | None,
        *,
        is_end: bool,
    ) -> "WindowedForward | None":
        """Return None if these layers have no pages of their own. carried: of the previous forward, if the
        first chunk continues it. is_end: of the last chunk."""
        pages = cache.windowed
        if pages is None or window is None:
            return None
        device = pages.k.device
        read, write, order, num_before, num_read, num_written = [], [], [], [], 0, 0
        num_carried = len(next(iter(carried.values()))[0]) if carried else 0
        for index, chunk in enumerate(chunks):
            span = chunk.positions
            first = max(span.start + 1 - window.size, 0)
            before = span.start - first
            if carried and index == 0:
                assert before == num_carried
                order.append(("carried", 0, before))
            else:
                held = chunk.prompt_window_pages | chunk.window_pages
                read.append(_slots(held, first, span.start, cache))
                assert not (read[-1] >= pages.unused_slot).any(), "a page that is read is not held"
                order.append(("read", num_read, before))
                num_read += before
            order.append(("written", num_written, len(span)))
            num_written += len(span)
            num_before.append(before)
            write.append(_slots(chunk.window_pages, span.start, span.stop, cache))
        starts = {"read": 0, "carried": num_read, "written": num_read + num_carried}
        rows = torch.cat([torch.arange(n) + starts[kind] + at for kind, at, n in order])
        lengths = [len(chunk.tokens_T) for chunk in chunks]
        num_keys = [n + before for n, before in zip(lengths, num_before, strict=True)]
        return cls(
            layers=frozenset(pages.layers),
            layout=PagedLayout(
                is_fresh=not any(num_before),
                key_slots=sent(rows, device),
                ends=SequenceEnds.of(lengths, num_keys, device),
            ),
            carried=None if is_end else {},
            _cache=cache,
            _before=carried,
            _read_slots=sent(torch.cat([torch.zeros(0, dtype=torch.long), *read]), device),
            _order=sent(rows, device) if any(num_before) else None,
            _write_slots_T=sent(torch.cat(write), device),
            _num_carried=min(window.size - 1, chunks[-1].positions.stop),
        )

    def keys(self, layer_index: int, k_TKH: Tensor, v_TKH: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values; return those that the spans see, k_RKH and v_RKH."""
        pages = self._cache.of_layer(layer_index)
        read = pages.rows(layer_index, self._read_slots, k_TKH.dtype) if len(self._read_slots) else None
        k_RKH, v_RKH = written = pages.write(layer_index, self._write_slots_T, k_TKH, v_TKH)
        if self._order is not None:
            sources = read, (self._before or {}).get(layer_index), written
            parts = [part for part in sources if part is not None]
            k_RKH, v_RKH = (torch.cat([part[i] for part in parts])[self._order] for i in range(2))
        if self.carried is not None:
            start = len(k_RKH) - self._num_carried
            self.carried[layer_index] = k_RKH[start:].clone(), v_RKH[start:].clone()
        return k_RKH, v_RKH


def _slots(held: dict[int, int], first: int, stop: int, cache: KVCache) -> Tensor:
    """Return the slots of the positions from `first` to before `stop`; without a page, unused ones."""
    assert cache.windowed is not None
    table = torch.full((-(-stop // cache.page_tokens),), cache.windowed.num_pages)
    for i, page in held.items():
        if i < len(table):
            table[i] = page
    positions = torch.arange(first, stop)
    return slots_of(table[positions // cache.page_tokens], positions, cache.page_tokens)
