"""Computes tokens that are known already by the decode step's own forward: exact prefills, and scoring.

    rows      tokens of the runs, one after the other; chunks of as many as the forward takes
    a row     its token, its position, its sequence's pages: as if it had just been drawn

All rows of a chunk write their keys and values before any attends, so a run may lie in one chunk or in many,
and a row's bits are those of the decode step that drew its successor (tests/parity/test_exact.py).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from qerl.engine.decode_forward import DecodeForward
from qerl.engine.prefill import PrefillRun
from qerl.engine.scheduler import num_pages
from qerl.kernels.cuda_graph import record_graph
from qerl.kernels.decode_state import DecodeState


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
        self.num_tokens = self.num_forwards = 0
        """Since they were last set to 0."""
        self.rows = rows
        self._forward, self._page_tokens, self._pool = forward, page_tokens, pool
        self._state = DecodeState.empty(rows, max_pages, 1, device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden_BD: Tensor | None = None

    def __call__(self, runs: list[PrefillRun]) -> Tensor:
        """Writes the runs' keys and values; the hidden state of each run's last token, [runs, D]."""
        ends = torch.tensor([len(run.tokens_T) for run in runs]).cumsum(0) - 1
        last, first = [], 0
        for hidden_BD in self.chunks(runs):
            here = ends[(ends >= first) & (ends < first + len(hidden_BD))] - first
            last.append(hidden_BD[here.to(hidden_BD.device)])
            first += len(hidden_BD)
        return torch.cat(last)

    def chunks(self, runs: list[PrefillRun]) -> Iterator[Tensor]:
        """The rows' hidden states, [rows, D] at a time; each is overwritten when the next is asked for."""
        device, lengths = self._state.tokens_B.device, torch.tensor([len(run.tokens_T) for run in runs])
        total, width = int(lengths.sum()), self._width(runs)
        num_rows = -(-total // self.rows) * self.rows
        host = torch.zeros(4, num_rows, dtype=torch.int32)
        host[0, :total] = torch.tensor([token for run in runs for token in run.tokens_T], dtype=torch.int32)
        host[1] = -1
        positions = [torch.arange(run.first_position, _end(run), dtype=torch.int32) for run in runs]
        host[1, :total] = torch.cat(positions)
        host[2, :total] = torch.arange(len(runs)).repeat_interleave(lengths)
        noise_rows = torch.tensor([run.noise_row for run in runs], dtype=torch.int32)
        host[3, :total] = noise_rows.repeat_interleave(lengths)
        tables = torch.zeros(len(runs), width, dtype=torch.int32)
        for table, run in zip(tables, runs, strict=True):
            pages = run.pages[:width]
            table[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        tokens_R, positions_R, runs_R, noise_rows_R = host.to(device)
        tables = tables.to(device)
        for start in range(0, num_rows, self.rows):
            some = slice(start, start + self.rows)
            self._state.tokens_B.copy_(tokens_R[some])
            self._state.positions_B.copy_(positions_R[some])
            self._state.noise_rows_B.copy_(noise_rows_R[some])
            self._state.tables_BX[:, :width] = tables[runs_R[some]]
            self.num_forwards += 1
            self.num_tokens += min(total - start, self.rows)
            yield self._step(width)

    def _width(self, runs: list[PrefillRun]) -> int:
        return num_pages(max(_end(run) for run in runs), self._page_tokens)

    def _step(self, width: int) -> Tensor:
        state = self._state
        if self._pool is None:
            return self._forward.together(state.of_width(width), self.rows)
        if self._graph is None:
            self._forward.together(state, self.rows)  # compiles what a recording could not
            self._graph = torch.cuda.CUDAGraph()
            with record_graph(self._graph, pool=self._pool):
                self._hidden_BD = self._forward.together(state, self.rows)
        self._graph.replay()
        assert self._hidden_BD is not None
        return self._hidden_BD


def _end(run: PrefillRun) -> int:
    return run.first_position + len(run.tokens_T)
