"""Compute the logprob of every sampled token under the current weights, as a decode step would.

    prompts      by teacher_forcing.py, once each; a prompt's last row predicts its samples' first tokens
    samples      likewise, on the prompt's pages; row i predicts token i + 1
    logprobs     of the known tokens, by the sampler

Samples come in batches that fit into the cache; each batch computes its prompts again. The logprobs are bit
for bit those recorded during sampling if weights and noise are the same: tests/parity/test_exact.py.
"""

import dataclasses
import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.teacher_forcing import TeacherForcing
from qerl.engine.prefill.chunk import PrefillChunk
from qerl.engine.sampling.sampler import Sampler
from qerl.engine.schedule.cache_space import CacheSpace, Space
from qerl.engine.schedule.page_pool import num_pages, own_pages
from qerl.kernels.head.token_mask import TokenMask
from qerl.types import AllowedTokens, Group, Sample


@dataclasses.dataclass(slots=True)
class _ScoreBatch:
    """Prompts and samples whose pages fit into the cache together."""

    prompts: list[PrefillChunk] = dataclasses.field(default_factory=list)
    samples: list[PrefillChunk] = dataclasses.field(default_factory=list)
    """All tokens of each sample, the last one too, which is predicted and not computed."""
    prompt_indices: list[int] = dataclasses.field(default_factory=list)
    """For each sample, the index of its prompt."""
    allowed: list[AllowedTokens | None] = dataclasses.field(default_factory=list)
    """The tokens that grammars allowed in place of each sample's, unsampled ones included."""


def score(
    groups: list[Group],
    noise_rows: list[tuple[int, list[int]]],
    cache: KVCache,
    teacher_forcing: TeacherForcing,
    sampler: Sampler,
) -> Tensor:
    """Return fp32 [tokens], group by group and sample by sample; noise_rows are those of NoiseTable.rows."""
    batches = _split_batches(groups, noise_rows, cache)
    return torch.cat([_score_batch(batch, cache, teacher_forcing, sampler) for batch in batches])


def _split_batches(
    groups: list[Group], noise_rows: list[tuple[int, list[int]]], cache: KVCache
) -> list[_ScoreBatch]:
    """Keep the samples' order. Any one sample fits into the cache with its prompt, and so do their states."""
    page_tokens, batches = cache.page_tokens, [_ScoreBatch()]
    space = CacheSpace(cache.space, page_tokens)
    num_slots = min(space.total.slots, 1)  # of a prompt, of a sample
    for group, (prompt_row, rows_G) in zip(groups, noise_rows, strict=True):
        P = len(group.prompt.tokens_T)
        prompt_pages: list[int] | None = None
        for sample, noise_row in zip(group.samples_G, rows_G, strict=True):
            num_own = own_pages(P, len(sample.tokens_T), page_tokens)
            is_first = prompt_pages is None
            needed = num_own + is_first * num_pages(P, page_tokens)
            if not space.has_free(Space(needed, slots=num_slots * (1 + is_first))):
                batches.append(_ScoreBatch())
                space, prompt_pages = CacheSpace(cache.space, page_tokens), None
            batch = batches[-1]
            if prompt_pages is None:
                prompt_pages = space.pages.allocate(num_pages(P, page_tokens))
                state, prompt_T = space.slots.allocate(num_slots), group.prompt.tokens_T
                batch.prompts.append(PrefillChunk(prompt_T, 0, prompt_pages, prompt_row, state=state))
            pages = prompt_pages[: P // page_tokens] + space.pages.allocate(num_own)
            state = space.slots.allocate(num_slots)
            batch.samples.append(PrefillChunk(sample.tokens_T, P, pages, noise_row, state=state))
            batch.prompt_indices.append(len(batch.prompts) - 1)
            batch.allowed.append(_of_all_tokens(sample))
    return batches


def _score_batch(
    batch: _ScoreBatch, cache: KVCache, teacher_forcing: TeacherForcing, sampler: Sampler
) -> Tensor:
    rows = teacher_forcing.rows
    hidden_PD = teacher_forcing(batch.prompts)
    device = hidden_PD.device
    hidden_BD = _padded(hidden_PD[torch.tensor(batch.prompt_indices, device=device)], rows).split(rows)
    first = [each and each.of(slice(1)) for each in batch.allowed]
    first_mask = TokenMask.joined(first, [1] * len(first), device)
    first_S = _logprobs(sampler, hidden_BD, [s.tokens_T[0] for s in batch.samples], rows, first_mask)
    pairs = zip(batch.samples, batch.prompt_indices, strict=True)
    longer = [(s, batch.prompts[index]) for s, index in pairs if len(s.tokens_T) > 1]
    if not longer:
        return first_S
    cache.copy_partial_pages([(s.first_position, prompt, s) for s, prompt in longer])
    if cache.states is not None:
        cache.states.copy([(prompt.state, s.state) for s, prompt in longer])
    chunks = [dataclasses.replace(s, tokens_T=s.tokens_T[:-1]) for s, _ in longer]
    later_tokens = [token for s, _ in longer for token in s.tokens_T[1:]]
    later = [each and each.of(slice(1, None)) for each in batch.allowed]
    later_mask = TokenMask.joined(later, [len(s.tokens_T) - 1 for s in batch.samples], device)
    later_T = _logprobs(sampler, teacher_forcing.hidden_states(chunks), later_tokens, rows, later_mask)
    lengths = torch.tensor([len(s.tokens_T) for s in batch.samples])
    is_first_T = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    is_first_T[lengths.cumsum(0) - lengths] = True
    logprobs_T = torch.empty(len(is_first_T), device=device)
    logprobs_T[is_first_T.to(device)] = first_S
    logprobs_T[~is_first_T.to(device)] = later_T
    return logprobs_T


def _logprobs(
    sampler: Sampler, hidden: Iterable[Tensor], tokens: list[int], rows: int, mask: TokenMask | None
) -> Tensor:
    """Return the logprob of each token after its hidden state; hidden: blocks [rows, D], padded. mask: the
    tokens that grammars allowed."""
    parts, tokens_CB = [], _padded(torch.tensor(tokens), rows).view(-1, rows)
    for hidden_BD in hidden:
        leave_out = None if mask is None else functools.partial(mask.fill_, start=rows * len(parts))
        tokens_B = tokens_CB[len(parts)].to(hidden_BD.device)
        parts.append(sampler.score(hidden_BD, tokens_B, leave_out))
    return torch.cat(parts)[: len(tokens)]


def _of_all_tokens(sample: Sample) -> AllowedTokens | None:
    """Return the tokens allowed in place of each of the sample's, unsampled ones included."""
    if sample.allowed is None:
        return None
    set_T: list[int | None] = [None] * len(sample.tokens_T)
    for index, allowed in zip(sample.sampled_indices, sample.allowed.set_C, strict=True):
        set_T[index] = allowed
    return AllowedTokens(sample.allowed.sets, set_T)


def _padded(x: Tensor, rows: int) -> Tensor:
    """Append zeros until the number of rows is a multiple of `rows`."""
    return torch.cat((x, x.new_zeros(-len(x) % rows, *x.shape[1:])))
