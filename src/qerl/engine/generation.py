"""One call's samples, drawn to their ends: the circle of growing, entering, admitting and decoding.

    prefill   rows of prompts (and of paused samples) write their keys and values, and attend to their pages
    draw      G first tokens from the last row of a prompt; one token from the row of each running sample
    decode    the newest token of each running sample, one row each, in one forward

A sample's randomness is uniform(seed, step, prompt.index, sample_index, its number in the sample), so what it
becomes does not depend on the batch, the pages or the pauses: tests/engine/test_engine.py.
B is the rows of a decode, R the rows of the tables, X the pages of the longest sequence.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from qerl.engine.cache import Cache
from qerl.engine.sampling import sample
from qerl.engine.scheduler import LiveGroup, LiveSample, Scheduler, num_pages
from qerl.engine.text import Text
from qerl.errors import UserError
from qerl.kernels.attention import Span, paged_decode, paged_prefill
from qerl.model.decoder import Decoder
from qerl.seeds import uniform
from qerl.types import Prompt, Sampling


@dataclasses.dataclass(slots=True)
class Stats:
    """What one call of generate did."""

    num_tokens: int = 0
    """Sampled."""
    prefill_tokens: int = 0
    """Rows of all prefills: each prompt once, and what paused samples had to compute again."""
    decode_forwards: int = 0
    prefill_forwards: int = 0
    pauses: int = 0
    peak_pages: int = 0
    """Most KV pages in use at once."""
    generate_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generate_s if self.generate_s else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tokens of one sequence, whose earlier positions are in its pages."""

    tokens_T: list[int]
    first_position: int
    pages: list[int]


class Generation:
    def __init__(
        self,
        decoder: Decoder,
        cache: Cache,
        scheduler: Scheduler,
        prompts_P: list[Prompt],
        text: Text,
        *,
        sampling: Sampling,
        stop_token_ids: frozenset[int],
        prefill_tokens: int,
        table_size: tuple[int, int],
        seed: int,
        step: int,
    ):
        self.stats = Stats()
        self._decoder, self._cache, self._scheduler = decoder, cache, scheduler
        self._prompts_P, self._text, self._sampling = prompts_P, text, sampling
        self._stop_token_ids, self._prefill_tokens = stop_token_ids, prefill_tokens
        self._tables_RX = torch.zeros(table_size, dtype=torch.long)
        self._seed, self._step = seed, step

    def run(self) -> None:
        scheduler = self._scheduler
        while not scheduler.is_done:
            self._set_tables(scheduler.grow())
            self._enter(scheduler.enter())
            admitted = scheduler.admit()
            if admitted:
                self._start(admitted)
                self._enter(scheduler.enter())
            assert scheduler.running or admitted, "no sample can go on"
            self.stats.peak_pages = max(self.stats.peak_pages, scheduler.pages.num_used)
            if scheduler.running:
                self._decode()
        self.stats.pauses = scheduler.num_pauses

    def _start(self, groups: list[LiveGroup]) -> None:
        """Computes the prompts, and draws the first token of all their samples."""
        runs = [_Run(self._prompts_P[g.index].tokens_T, 0, g.pages) for g in groups]
        logits_PV = self._decoder.logits(self._prefill(runs))
        pairs = [(row, s) for row, group in enumerate(groups) for s in group.samples_G]
        max_rows = len(self._tables_RX)
        for first in range(0, len(pairs), max_rows):
            rows, samples = zip(*pairs[first : first + max_rows], strict=True)
            self._draw(logits_PV[torch.tensor(rows, device=logits_PV.device)], list(samples))

    def _enter(self, entered: list[LiveSample]) -> None:
        """Copies the prompt's partial page for each; computes again what a resumed one had cached."""
        self._set_tables(entered)
        page_tokens = self._cache.page_tokens
        partial = [s for s in entered if s.group.prompt_tokens % page_tokens]
        if partial:
            places = [s.group.prompt_tokens // page_tokens for s in partial]
            targets = [s.pages[place] for s, place in zip(partial, places, strict=True)]
            self._cache.copy_pages([s.group.pages[-1] for s in partial], targets)
        resumed = [s for s in entered if len(s.tokens_T) > 1]
        if resumed:
            self._prefill([_Run(s.tokens_T[:-1], s.group.prompt_tokens, s.pages) for s in resumed])

    def _prefill(self, runs: list[_Run]) -> Tensor:
        """Writes the runs' keys and values; the hidden state of each run's last token, [runs, D]."""
        last_hidden = []
        for parts in _forwards(runs, self._prefill_tokens):
            hidden_TD = self._prefill_forward(parts)
            ends, row = [], 0
            for part, ends_run in parts:
                row += len(part.tokens_T)
                if ends_run:
                    ends.append(row - 1)
            last_hidden.append(hidden_TD[torch.tensor(ends, dtype=torch.long, device=hidden_TD.device)])
        return torch.cat(last_hidden)

    def _prefill_forward(self, parts: list[tuple[_Run, bool]]) -> Tensor:
        cache, device = self._cache, self._decoder.device
        spans, positions, slots, row = [], [], [], 0
        for run, _ in parts:
            end = run.first_position + len(run.tokens_T)
            table = torch.tensor(run.pages[: num_pages(end, cache.page_tokens)])
            positions.append(torch.arange(run.first_position, end))
            slots.append(_slots(table[positions[-1] // cache.page_tokens], positions[-1], cache.page_tokens))
            spans.append(
                Span(
                    start_row=row, num_rows=len(run.tokens_T), first_position=run.first_position, table=table
                )
            )
            row += len(run.tokens_T)
        tokens_T = torch.tensor([token for run, _ in parts for token in run.tokens_T], device=device)
        slots_T = torch.cat(slots).to(device)

        def attend(layer_index: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            cache.write(layer_index, slots_T, k_TKH, v_TKH)
            return paged_prefill(q_TNH, cache.k[layer_index], cache.v[layer_index], spans)

        self.stats.prefill_forwards += 1
        self.stats.prefill_tokens += row
        return self._decoder(tokens_T, torch.cat(positions).to(device), attend)

    def _decode(self) -> None:
        """One token more for each running sample."""
        cache, device = self._cache, self._decoder.device
        running = self._scheduler.running
        tokens_B = torch.tensor([s.tokens_T[-1] for s in running])
        lengths_B = torch.tensor([s.num_positions for s in running])
        rows_B = torch.tensor([s.row for s in running])
        tables_BX = self._tables_RX[rows_B, : num_pages(int(lengths_B.max()), cache.page_tokens)]
        positions_B = lengths_B - 1
        pages_B = tables_BX.gather(1, positions_B[:, None] // cache.page_tokens)[:, 0]
        slots_B = _slots(pages_B, positions_B, cache.page_tokens).to(device)
        tables_BX, lengths_B = tables_BX.to(device), lengths_B.to(device)

        def attend(layer_index: int, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor) -> Tensor:
            cache.write(layer_index, slots_B, k_BKH, v_BKH)
            return paged_decode(q_BNH, cache.k[layer_index], cache.v[layer_index], tables_BX, lengths_B)

        hidden_BD = self._decoder(tokens_B.to(device), positions_B.to(device), attend)
        self.stats.decode_forwards += 1
        self._draw(self._decoder.logits(hidden_BD), running)

    def _draw(self, logits_BV: Tensor, samples: list[LiveSample]) -> None:
        """Adds a token to each sample, and lets those go that it finished."""
        uniforms = [
            uniform(
                self._seed, self._step, self._prompts_P[s.group.index].index, s.sample_index, len(s.tokens_T)
            )
            for s in samples
        ]
        uniforms_B = torch.tensor(uniforms, dtype=torch.float64, device=logits_BV.device)
        tokens_B, logprobs_B = sample(logits_BV, self._sampling, uniforms_B)
        for s, token, logprob in zip(samples, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            if not math.isfinite(logprob):
                index = self._prompts_P[s.group.index].index
                raise UserError(
                    f"prompt {index}: the model's logits after {s.num_positions} tokens are not finite"
                )
            s.tokens_T.append(token)
            s.logprobs_T.append(logprob)
            s.finish = self._finish(s)
        self.stats.num_tokens += len(samples)
        self._scheduler.finish([s for s in samples if s.finish is not None])

    def _finish(self, s: LiveSample) -> Literal["stop", "length"] | None:
        if s.tokens_T[-1] in self._stop_token_ids or self._text.has_stop(s.tokens_T):
            return "stop"
        return "length" if len(s.tokens_T) == s.group.max_tokens else None

    def _set_tables(self, samples: list[LiveSample]) -> None:
        """Writes the pages of new samples, and of those with a new page, into their rows."""
        if samples:
            rows = torch.tensor([s.row for s in samples for _ in s.pages])
            columns = torch.tensor([column for s in samples for column in range(len(s.pages))])
            self._tables_RX[rows] = 0
            self._tables_RX[rows, columns] = torch.tensor([page for s in samples for page in s.pages])


def _slots(pages_T: Tensor, positions_T: Tensor, page_tokens: int) -> Tensor:
    return pages_T * page_tokens + positions_T % page_tokens


def _forwards(runs: list[_Run], max_tokens: int) -> Iterator[list[tuple[_Run, bool]]]:
    """The runs cut into forwards of at most max_tokens; with each part, whether its run ends there."""
    parts, num_free = [], max_tokens
    for run in runs:
        first = 0
        while first < len(run.tokens_T):
            tokens_T = run.tokens_T[first : first + num_free]
            first += len(tokens_T)
            num_free -= len(tokens_T)
            position = run.first_position + first - len(tokens_T)
            parts.append((_Run(tokens_T, position, run.pages), first == len(run.tokens_T)))
            if num_free == 0:
                yield parts
                parts, num_free = [], max_tokens
    if parts:
        yield parts
