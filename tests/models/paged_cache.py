"""A paged KV cache for one decoder, with the two functions that attend to it."""

import torch

from qerl.kernels.attention.attention import PagedLayout, paged_decode, span_attention
from qerl.kernels.delta_net.gated_delta import SequenceLayout
from qerl.kernels.delta_net.gated_delta_net import DeltaState, mix, mix_step


class PagedCache:
    """Pages of all layers in an order that is not that of the positions; attends to them."""

    def __init__(self, decoder, *, max_tokens, page_tokens=4):
        arch, num_pages = decoder.architecture, max_tokens // page_tokens + 5
        heads = [arch.kv_heads(kind) for kind in arch.kinds]
        shapes = [(2, num_pages, page_tokens, each.num, each.size) for each in heads]
        pages = [torch.full(shape, 9.0, dtype=decoder.compute) for shape in shapes]  # wrong, finite
        self.k, self.v = zip(*pages, strict=True)
        self.page_tokens, self.states = page_tokens, {}
        self.order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))

    def recur(self, layer_index, inputs):
        """The states of one sequence go on with its next rows."""
        state = self.states.get(layer_index, DeltaState.zeros(inputs.shape, 1, inputs.qkv_TC))
        if len(inputs.qkv_TC) == 1:
            o_TNV, self.states[layer_index] = mix_step(inputs, state)
        else:
            layout = SequenceLayout.of([len(inputs.qkv_TC)])
            o_TNV, self.states[layer_index] = mix(inputs, layout, state)
        return o_TNV

    def table(self, sequence, num_tokens, *, pages_each):
        num_pages = -(-num_tokens // self.page_tokens)
        return self.order[sequence * pages_each : sequence * pages_each + num_pages]

    def write(self, layer_index, rows_T, k_TKH, v_TKH):
        self.k[layer_index].flatten(0, 1)[rows_T] = k_TKH
        self.v[layer_index].flatten(0, 1)[rows_T] = v_TKH

    def rows(self, table, positions):
        return table[positions // self.page_tokens] * self.page_tokens + positions % self.page_tokens

    def prefill(self, spans):
        layout = PagedLayout.of(spans, self.page_tokens, "cpu")

        def attend(layer_index, q_TNH, k_TKH, v_TKH, options):
            for s in spans:
                own = slice(s.start_row, s.start_row + s.num_rows)
                positions = torch.arange(s.first_position, s.first_position + s.num_rows)
                self.write(layer_index, self.rows(s.table, positions), k_TKH[own], v_TKH[own])
            if not layout.is_fresh:
                pages = self.k[layer_index], self.v[layer_index]
                k_TKH, v_TKH = (each.flatten(0, 1)[layout.key_slots] for each in pages)
            return span_attention(q_TNH, k_TKH, v_TKH, layout, options)

        return attend

    def decode(self, tables_BX, lengths_B):
        def attend(layer_index, q_BNH, k_BKH, v_BKH, options):
            rows_B = torch.stack([self.rows(t, n - 1) for t, n in zip(tables_BX, lengths_B, strict=True)])
            self.write(layer_index, rows_B, k_BKH, v_BKH)
            pages = self.k[layer_index], self.v[layer_index]
            return paged_decode(q_BNH, *pages, tables_BX, lengths_B, options)

        return attend
