"""Computes prompts, and what paused samples had computed before, in forwards of many rows at once.

A run is neighbouring tokens of one sequence, whose earlier positions are in its pages. Runs are packed into
forwards of at most max_tokens rows; one that does not fit is cut. Each forward writes its keys and values to
the cache, and its rows attend to their sequence's positions up to their own.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from qerl.engine.kv_cache import KVCache, slots_of
from qerl.engine.scheduler import num_pages
from qerl.kernels.attention import PagedLayout, Span, span_attention
from qerl.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillRun:
    tokens_T: list[int]
    first_position: int
    pages: list[int]
    noise_row: int = 0
    """In the norms' table of noise."""


class Prefill:
    def __init__(self, decoder: Decoder, cache: KVCache, max_tokens: int):
        self.num_tokens = 0
        """Rows of all forwards."""
        self.num_forwards = 0
        self._decoder, self._cache, self._max_tokens = decoder, cache, max_tokens

    def __call__(self, runs: list[PrefillRun]) -> Tensor:
        """Writes the runs' keys and values; the hidden state of each run's last token, [runs, D]."""
        last_hidden = []
        for parts in forwards(runs, self._max_tokens):
            hidden_TD = self._forward([run for run, _ in parts])
            ends, row = [], 0
            for run, is_end in parts:
                row += len(run.tokens_T)
                if is_end:
                    ends.append(row - 1)
            last_hidden.append(hidden_TD[torch.tensor(ends, dtype=torch.long, device=hidden_TD.device)])
        return torch.cat(last_hidden)

    def _forward(self, runs: list[PrefillRun]) -> Tensor:
        cache, device = self._cache, self._decoder.device
        spans, positions, slots, row = [], [], [], 0
        for run in runs:
            end = run.first_position + len(run.tokens_T)
            table = torch.tensor(run.pages[: num_pages(end, cache.page_tokens)])
            positions_T = torch.arange(run.first_position, end)
            slots.append(slots_of(table[positions_T // cache.page_tokens], positions_T, cache.page_tokens))
            positions.append(positions_T)
            spans.append(
                Span(
                    start_row=row, num_rows=len(run.tokens_T), first_position=run.first_position, table=table
                )
            )
            row += len(run.tokens_T)
        layout = PagedLayout.of(spans, cache.page_tokens, device)
        tokens_T = torch.tensor([token for run in runs for token in run.tokens_T], device=device)
        slots_T = torch.cat(slots).to(device)

        def attend(layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            k_TKH, v_TKH = cache.write(layer_index, slots_T, k_TKH, v_TKH)
            if not layout.is_fresh:
                k_TKH, v_TKH = cache.rows(layer_index, layout.key_slots, q_TNH.dtype)
            return span_attention(q_TNH, k_TKH, v_TKH, layout)

        self.num_forwards += 1
        self.num_tokens += row
        lengths, noise_rows = zip(*((len(run.tokens_T), run.noise_row) for run in runs), strict=True)
        noise_rows_T = torch.tensor(noise_rows, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
        positions_T = torch.cat(positions).to(device)
        return self._decoder(tokens_T, positions_T, attend, noise_rows_T=noise_rows_T.to(device))


def forwards(runs: list[PrefillRun], max_tokens: int) -> Iterator[list[tuple[PrefillRun, bool]]]:
    """The runs cut into forwards of at most max_tokens; with each part, whether its run ends there."""
    parts, num_free = [], max_tokens
    for run in runs:
        first = 0
        while first < len(run.tokens_T):
            tokens_T = run.tokens_T[first : first + num_free]
            first += len(tokens_T)
            num_free -= len(tokens_T)
            position = run.first_position + first - len(tokens_T)
            parts.append(
                (PrefillRun(tokens_T, position, run.pages, run.noise_row), first == len(run.tokens_T))
            )
            if num_free == 0:
                yield parts
                parts, num_free = [], max_tokens
    if parts:
        yield parts
