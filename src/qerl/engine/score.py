"""The logprob of every sampled token under the weights as they now are, as a decode step would have it.

    prompts      by replay.py, each once; the last row of each predicts its samples' first tokens
    samples      the same, their rows beside the prompt's pages; row i predicts token i + 1
    logprobs     by the draw's own head, of given tokens

As many samples at a time as there are pages for, prompts in front of each lot again. Bit for bit what
sampling recorded, if the weights and the noise are those of then: tests/parity/test_exact.py.
"""

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from qerl.engine.kv_cache import KVCache
from qerl.engine.page_pool import PagePool
from qerl.engine.prefill import PrefillRun
from qerl.engine.sampler import Sampler
from qerl.engine.scheduler import num_pages, own_pages
from qerl.engine.teacher_forcing import TeacherForcing
from qerl.types import Group, Prompt, Sample


@dataclasses.dataclass(frozen=True, slots=True)
class _Seat:
    """A sample with its pages."""

    sample: Sample
    prompt: Prompt
    prompt_index: int
    """Among the prompts of its lot."""
    pages: list[int]
    noise_row: int


@dataclasses.dataclass(slots=True)
class _Batch:
    """What has pages at the same time."""

    prompts: list[PrefillRun] = dataclasses.field(default_factory=list)
    seats: list[_Seat] = dataclasses.field(default_factory=list)


def score(
    groups: list[Group],
    noise_rows: list[tuple[int, list[int]]],
    cache: KVCache,
    replay: TeacherForcing,
    draw: Sampler,
) -> Tensor:
    """fp32 [tokens], group by group, sample by sample; noise_rows: each group's, as NoiseTable.rows has
    them."""
    return torch.cat([_scored(lot, cache, replay, draw) for lot in _lots(groups, noise_rows, cache)])


def _lots(groups: list[Group], noise_rows: list[tuple[int, list[int]]], cache: KVCache) -> list[_Batch]:
    """In the samples' order; each sample fits into the cache beside its prompt."""
    page_tokens, lots, pages = cache.page_tokens, [_Batch()], PagePool(cache.num_pages)
    for group, (prompt_row, rows_G) in zip(groups, noise_rows, strict=True):
        P = len(group.prompt.tokens_T)
        shared: list[int] | None = None
        for sample, noise_row in zip(group.samples_G, rows_G, strict=True):
            num_own = own_pages(P, len(sample.tokens_T), page_tokens)
            if num_own + (num_pages(P, page_tokens) if shared is None else 0) > pages.num_free:
                lots.append(_Batch())
                pages, shared = PagePool(cache.num_pages), None
            if shared is None:
                shared = pages.take(num_pages(P, page_tokens))
                lots[-1].prompts.append(PrefillRun(group.prompt.tokens_T, 0, shared, prompt_row))
            own = shared[: P // page_tokens] + pages.take(num_own)
            lots[-1].seats.append(_Seat(sample, group.prompt, len(lots[-1].prompts) - 1, own, noise_row))
    return lots


def _scored(lot: _Batch, cache: KVCache, replay: TeacherForcing, draw: Sampler) -> Tensor:
    hidden_PD = replay(lot.prompts)
    device, seats = hidden_PD.device, lot.seats
    partial = [s for s in seats if len(s.prompt.tokens_T) % cache.page_tokens and len(s.sample.tokens_T) > 1]
    if partial:
        places = [len(s.prompt.tokens_T) // cache.page_tokens for s in partial]
        sources = [lot.prompts[s.prompt_index].pages[-1] for s in partial]
        cache.copy_pages(sources, [s.pages[place] for s, place in zip(partial, places, strict=True)])
    prompt_S = torch.tensor([s.prompt_index for s in seats], device=device)
    hidden_BD = _padded(hidden_PD[prompt_S], replay.rows).split(replay.rows)
    first_S = _logprobs(draw, hidden_BD, [s.sample.tokens_T[0] for s in seats], replay.rows, device)
    lengths = torch.tensor([len(s.sample.tokens_T) for s in seats])
    is_first_T = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    is_first_T[lengths.cumsum(0) - lengths] = True
    logprobs_T = torch.empty(len(is_first_T), device=device)
    logprobs_T[is_first_T.to(device)] = first_S
    rest = [s for s in seats if len(s.sample.tokens_T) > 1]
    if rest:
        runs = [
            PrefillRun(s.sample.tokens_T[:-1], len(s.prompt.tokens_T), s.pages, s.noise_row) for s in rest
        ]
        tokens = [token for s in rest for token in s.sample.tokens_T[1:]]
        logprobs_T[~is_first_T.to(device)] = _logprobs(draw, replay.chunks(runs), tokens, replay.rows, device)
    return logprobs_T


def _logprobs(
    draw: Sampler, hidden: Iterable[Tensor], tokens: list[int], rows: int, device: torch.device
) -> Tensor:
    """Of the token after each hidden state, which come [rows, D] at a time, the last ones padded."""
    parts, tokens_CB = [], _padded(torch.tensor(tokens), rows).to(device).view(-1, rows)
    for hidden_BD in hidden:
        parts.append(draw.score(hidden_BD, tokens_CB[len(parts)]))
    return torch.cat(parts)[: len(tokens)]


def _padded(x: Tensor, rows: int) -> Tensor:
    """With zeros behind, so that its rows are a multiple."""
    return torch.cat((x, x.new_zeros(-len(x) % rows, *x.shape[1:])))
