"""Compute known tokens with the decode step's own forward: exact prefills and scoring.

    rows      the chunks' tokens in order, `rows` of them a forward
    a row     token, position and pages of its sequence, as if the token had just been sampled

All rows of a forward write their keys and values before any attends, and recurrent states take the rows of
a sequence one after the other, in its slot. So a chunk may span several forwards, and a row's bits are those
of the decode step that sampled the next token (tests/parity/test_exact.py, test_exact_hybrids.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qerl.engine.decode.forward import DecodeForward
from qerl.engine.prefill.chunk import PrefillChunk, chunk_rows
from qerl.engine.schedule.page_pool import num_pages
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.runtime.cuda_graph import record_graph


class TeacherForcing:
    def __init__(
        self,
        forward: DecodeForward,
        *,
        rows: int,
        max_pages: int,
        page_tokens: int,
        device: torch.device,
        pool: Any,
    ):
        """pool: memory pool of the CUDA graphs; None on a CPU, where no graph is recorded. Nor is one of a
        forward that waits for the device."""
        self.num_tokens = self.num_forwards = 0
        """Counted since they were last set to 0."""
        self.rows = rows
        self._forward, self._page_tokens, self._pool = forward, page_tokens, pool
        self._state = DecodeState.empty(rows, max_pages, 1, device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden_BD: Tensor | None = None

    def __call__(self, chunks: list[PrefillChunk]) -> Tensor:
        """Write the chunks' keys and values; return the hidden states of their last rows, [chunks, D]."""
        ends = torch.tensor([len(chunk.tokens_T) for chunk in chunks]).cumsum(0) - 1
        last, first = [], 0
        for hidden_BD in self.hidden_states(chunks):
            for chunk, end in zip(chunks, ends.tolist(), strict=True):
                start = max(end + 1 - len(chunk.tokens_T) - first, 0)
                if chunk.on_hidden is not None and start < min(end + 1 - first, len(hidden_BD)):
                    chunk.on_hidden(hidden_BD[start : end + 1 - first])
            here = ends[(ends >= first) & (ends < first + len(hidden_BD))] - first
            last.append(hidden_BD[here.to(hidden_BD.device)])
            first += len(hidden_BD)
        return torch.cat(last)

    def hidden_states(self, chunks: list[PrefillChunk]) -> Iterator[Tensor]:
        """Yield the hidden states [rows, D] of each forward; the next forward overwrites them."""
        device, state = self._state.tokens_B.device, self._state
        columns = chunk_rows(chunks)
        total = columns.shape[1]
        width = num_pages(max(chunk.positions.stop for chunk in chunks), self._page_tokens)
        num_rows = -(-total // self.rows) * self.rows
        host = torch.zeros(4, num_rows, dtype=torch.int32)
        host[1] = -1
        host[:, :total] = columns
        tables = torch.zeros(len(chunks), width, dtype=torch.int32)
        for table, chunk in zip(tables, chunks, strict=True):
            pages = chunk.pages[:width]
            table[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        tokens_R, positions_R, chunks_R, noise_rows_R = host.to(device)
        tables = tables.to(device)
        slots = torch.tensor([chunk.state[0] if chunk.state else 0 for chunk in chunks], device=device)
        for start in range(0, num_rows, self.rows):
            some = slice(start, start + self.rows)
            state.tokens_B.copy_(tokens_R[some])
            state.positions_B.copy_(positions_R[some])
            state.noise_rows_B.copy_(noise_rows_R[some])
            state.states_B.copy_(slots[chunks_R[some]])
            state.tables_BX[:, :width] = tables[chunks_R[some]]
            self.num_forwards += 1
            self.num_tokens += min(total - start, self.rows)
            yield self._step(width)

    def _step(self, width: int) -> Tensor:
        state = self._state
        if self._pool is None or not self._forward.is_capturable:
            return self._forward.together(state.of_width(width), self.rows)
        if self._graph is None:
            # It compiles kernels, which must not happen in a recording. A second run of these rows, by the
            # graph, would take their recurrent states too far.
            hidden_BD = self._forward.together(state, self.rows)
            self._graph = torch.cuda.CUDAGraph()
            with record_graph(self._graph, pool=self._pool):
                self._hidden_BD = self._forward.together(state, self.rows)
            return hidden_BD
        self._graph.replay()
        assert self._hidden_BD is not None
        return self._hidden_BD
