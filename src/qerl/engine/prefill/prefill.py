"""Prefill prompts, and recompute preempted samples, in forwards of many rows at once.

Chunks of sequences are packed into forwards (chunk.py). Each forward writes its keys and values to the cache,
and its rows attend to their sequence's positions up to their own. Recurrent states go on from the chunk's
slot, which then holds those after its last row.
"""

import itertools

import torch
from torch import Tensor

from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.cache.layer_pages import slots_of
from qerl.engine.cache.state_cache import StateCache
from qerl.engine.prefill.chunk import PrefillChunk, chunk_rows, split_into_forwards
from qerl.engine.prefill.window import WindowedForward
from qerl.engine.schedule.page_pool import num_pages
from qerl.engine.schedule.window_pages import Window
from qerl.kernels.attention.attention import PagedLayout, Span, span_attention
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.kernels.delta_net.gated_delta import SequenceLayout
from qerl.kernels.delta_net.gated_delta_net import DeltaInputs, mix
from qerl.kernels.runtime.gpu_memory import sent
from qerl.models.decoder import Decoder
from qerl.models.delta_net import Recur


class Prefill:
    def __init__(self, decoder: Decoder, cache: KVCache, max_tokens: int):
        self.num_tokens = 0
        """Rows of all forwards."""
        self.num_forwards = 0
        self._decoder, self._cache, self._max_tokens = decoder, cache, max_tokens
        self._window = Window.of(decoder.architecture, cache.page_tokens)

    def __call__(self, chunks: list[PrefillChunk]) -> Tensor:
        """Write the chunks' keys and values; return the hidden states of their last rows, [chunks, D]."""
        last_hidden, carried = [], None
        for parts in split_into_forwards(chunks, self._max_tokens):
            some = [chunk for chunk, _ in parts]
            windowed = WindowedForward.of(self._cache, self._window, some, carried, is_end=parts[-1][1])
            hidden_TD = self._forward(some, windowed)
            carried = None if windowed is None else windowed.carried
            stops = itertools.accumulate(len(chunk.tokens_T) for chunk in some)
            ends = [stop - 1 for stop, (_, is_end) in zip(stops, parts, strict=True) if is_end]
            last_hidden.append(hidden_TD[sent(torch.tensor(ends, dtype=torch.long), hidden_TD.device)])
        return torch.cat(last_hidden)

    def _forward(self, chunks: list[PrefillChunk], windowed: WindowedForward | None) -> Tensor:
        cache, device = self._cache, self._decoder.device
        tokens_T, positions_T, _, noise_rows_T = sent(chunk_rows(chunks), device)
        spans, slots, row = [], [], 0
        for chunk in chunks:
            table = torch.tensor(chunk.pages[: num_pages(chunk.positions.stop, cache.page_tokens)])
            positions = torch.arange(chunk.first_position, chunk.positions.stop)
            places = slots_of(table[positions // cache.page_tokens], positions, cache.page_tokens)
            slots.append(torch.full_like(places, cache.pages.unused_slot) if chunk.is_cached else places)
            num_rows, first = len(chunk.tokens_T), chunk.first_position
            spans.append(Span(start_row=row, num_rows=num_rows, first_position=first, table=table))
            row += num_rows
        layout = PagedLayout.of(spans, cache.page_tokens, device)
        slots_T = sent(torch.cat(slots), device)

        def attend(
            layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, options: AttentionOptions
        ) -> Tensor:
            if windowed is not None and layer_index in windowed.layers:
                k_RKH, v_RKH = windowed.keys(layer_index, k_TKH, v_TKH)
                return span_attention(q_TNH, k_RKH, v_RKH, windowed.layout, options)
            pages = cache.of_layer(layer_index)
            k_TKH, v_TKH = pages.write(layer_index, slots_T, k_TKH, v_TKH)
            if not layout.is_fresh:
                k_TKH, v_TKH = pages.rows(layer_index, layout.key_slots, q_TNH.dtype)
            return span_attention(q_TNH, k_TKH, v_TKH, layout, options)

        recur = None if cache.states is None else _recur_on(cache.states, chunks)
        self.num_forwards += 1
        self.num_tokens += row
        hidden_TD = self._decoder(
            tokens_T.long(),
            positions_T.long(),
            attend,
            recur=recur,
            noise_rows_T=noise_rows_T,
            route=cache.recording(slots_T),
        )
        for chunk, span in zip(chunks, spans, strict=True):
            if chunk.on_hidden is not None:
                chunk.on_hidden(hidden_TD[span.start_row : span.start_row + span.num_rows])
        return hidden_TD


def _recur_on(states: StateCache, chunks: list[PrefillChunk]) -> Recur:
    """Return a function that reads and writes the chunks' slots; a chunk at position 0 starts from zeros."""
    device = states.state.device
    layout = SequenceLayout.of([len(chunk.tokens_T) for chunk in chunks], device)
    slots_S = sent(torch.tensor([chunk.state[0] for chunk in chunks]), device)
    is_new_S = sent(torch.tensor([chunk.first_position == 0 for chunk in chunks]), device)

    def recur(layer_index: int, inputs: DeltaInputs) -> Tensor:
        o_TNV, after = mix(inputs, layout, states.read(layer_index, slots_S, is_new_S))
        states.write(layer_index, slots_S, after)
        return o_TNV

    return recur
