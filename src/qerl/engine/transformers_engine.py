"""The engine of a model that transformers runs: the scheduling, sampling and turns of our own engine over
transformers' forward passes and caches.

    TransformersPrefill    prompts of one length together -> logits after each
    TransformersRunner     the running samples, one forward pass for those of each length (Lockstep)

Pages are counted but hold nothing: there are as many as all samples need. What the generation calls hidden
states are logits here. A token's random number is the one that our own engine draws on a CPU (TorchSampler),
and depends on nothing but its coordinates. Its logits come from a forward pass of the rows of its length,
which need no padding: other rows can change them only by the order of a matrix product's sums, in the last
bits. A prompt is computed once for all of its samples; a turn of a conversation computes its sample again.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.config import EngineConfig
from qerl.engine.decode.runner import Burst
from qerl.engine.generation import Generation, StoppingCriteria
from qerl.engine.local_engine import LocalEngine, NewGeneration
from qerl.engine.prefill.chunk import PrefillChunk
from qerl.engine.sampling.row_sampler import RowSampler
from qerl.engine.sampling.sampler import Sampler, TorchSampler
from qerl.engine.schedule.cache_space import CacheSpace, HasPages, Space
from qerl.engine.schedule.carried_cache import CachedSpan, CarriedCache
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.engine.schedule.page_pool import PagePool, min_group_pages, num_pages
from qerl.engine.schedule.scheduler import Scheduler
from qerl.models.transformers_backend.transformers_model import TransformersModel
from qerl.types import Sampling

_PREFILL_TOKENS = 4096
_MAX_PAGES = 1 << 18  # of a server, whose requests could be as long as the model allows


class TransformersEngine(LocalEngine):
    def __init__(
        self,
        model: TransformersModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        stop_token_ids: frozenset[int],
    ):
        super().__init__(
            model,
            tokenizer,
            stop_token_ids=stop_token_ids,
            max_num_batched_tokens=config.max_num_batched_tokens or _PREFILL_TOKENS,
        )
        self._transformer, self._config = model, config
        self.max_rows = config.max_rows(has_kernels=False)
        self._stop_tokens = torch.tensor(sorted(stop_token_ids) or [-1], dtype=torch.int32).to(model.device)

    @property
    def notices(self) -> list[str]:
        limit = (
            "engine.kv_cache_gb limits the pages of our own engine: transformers' caches take what they need"
        )
        return [*self._transformer.notices, *([limit] if self._config.kv_cache_gb is not None else [])]

    @contextlib.contextmanager
    def open(self, groups: list[LiveGroup], sampling: Sampling | None) -> Iterator[NewGeneration]:
        page_tokens = self._config.block_size
        needed = [_pages(group, page_tokens) for group in groups]
        pages = max(min(sum(needed), _MAX_PAGES), *needed)

        def new_generation(
            groups: list[LiveGroup],
            stopping: StoppingCriteria,
            max_admitted_tokens: int | None = None,
            kept_fraction: float = 0.0,
        ) -> Generation:
            space = CacheSpace(Space(pages), page_tokens)  # pages hold nothing that could be kept
            caches = PromptCaches(space.pages)
            prefill = TransformersPrefill(self._transformer, caches, self._max_num_batched_tokens)
            return Generation(
                caches,
                Scheduler(groups, space, max_num_seqs=self.max_rows, max_admitted_tokens=max_admitted_tokens),
                prefill,
                TransformersRunner(self._transformer, self._sampler(sampling), caches),
                stopping,
            )

        yield new_generation

    def _sampler(self, sampling: Sampling | None) -> Sampler:
        if sampling is None:
            return RowSampler(self._transformer, self._stop_tokens, self.max_rows)
        return TorchSampler(self._transformer, sampling, self._stop_tokens)


def _pages(group: LiveGroup, page_tokens: int) -> int:
    """Return the pages of a group whose samples all run, with one in reserve for each."""
    each = min_group_pages(group.prompt_tokens, group.max_tokens, page_tokens) + 1
    return num_pages(group.prompt_tokens, page_tokens) + len(group.samples_G) * each


class Lockstep:
    """Samples that grow together in one of transformers' caches: rows [B, T] of the same length.

    A row needs no padding and no mask, so that every kind of layer computes it as it does a lone sequence. A
    model that returns no cache, or one of a class of its own (MiniMax's does not reorder its states),
    computes all tokens again at every step.
    """

    def __init__(self, model: TransformersModel, tokens_BT: Tensor, cache: Any):
        """cache: after tokens_BT; None if the model has none."""
        self.tokens_BT, self._model, self._cache = tokens_BT, model, cache

    @property
    def length(self) -> int:
        return self.tokens_BT.shape[1]

    def copy_of(self, rows: Sequence[int]) -> "Lockstep":
        """Return these rows in this order, some perhaps several times, with a cache of their own."""
        rows_B = torch.tensor(rows, device=self.tokens_BT.device)
        cache = copy.deepcopy(self._cache)
        if cache is not None:
            cache.reorder_cache(rows_B)
        return Lockstep(self._model, self.tokens_BT[rows_B], cache)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        if len(rows) < len(self.tokens_BT):
            rows_B = torch.tensor(rows, device=self.tokens_BT.device)
            self.tokens_BT = self.tokens_BT[rows_B]
            if self._cache is not None:
                self._cache.reorder_cache(rows_B)

    def extend(self, tokens_BT: Tensor) -> Tensor:
        """Append tokens to each row; return the logits after the last one, fp32 [B, V]."""
        self.tokens_BT = torch.cat((self.tokens_BT, tokens_BT), 1)
        uncached_BT = self.tokens_BT if self._cache is None else tokens_BT
        logits_BTV, self._cache = forward(self._model, uncached_BT, self._cache, num_logits=1)
        return logits_BTV[:, -1].float()


def begin(model: TransformersModel, tokens_BT: Tensor, *, num_logits: int) -> tuple[Lockstep, Tensor]:
    """Compute prompts of one length; return them and the logits of their last num_logits positions."""
    logits_BTV, cache = forward(model, tokens_BT, None, num_logits=num_logits)
    return Lockstep(model, tokens_BT, cache), logits_BTV[:, -num_logits:].float()


def forward(
    model: TransformersModel, tokens_BT: Tensor, cache: Any, *, num_logits: int
) -> tuple[Tensor, Any]:
    """Return (logits of at least the last num_logits positions, the cache after the tokens)."""
    parameters = inspect.signature(model.model.forward).parameters
    options = {"logits_to_keep": num_logits} if "logits_to_keep" in parameters else {}
    name = "cache" if "cache" in parameters else "past_key_values"  # its name before transformers 5.24
    output = model.model(tokens_BT, **{name: cache}, use_cache=True, **options)
    after = getattr(output, name, None)
    is_known = type(after).__module__ == "transformers.cache_utils" and hasattr(after, "reorder_cache")
    return output.logits, after if is_known else None


class PromptCaches:
    """The caches of prompts whose samples have not all started, by the first page of the prompt's group,
    which has one owner at a time."""

    states = None

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._of: dict[int, tuple[Lockstep, int]] = {}

    def copy_partial_pages(self, copies: list[tuple[int, HasPages, HasPages]]) -> None:
        """Do nothing: pages hold nothing."""

    def carry(self, spans: list[CachedSpan]) -> list[CarriedCache | None]:
        return [None] * len(spans)

    def restore(self, carried: CarriedCache, span: CachedSpan) -> None:
        """Do nothing: nothing is carried."""

    def read_routes(self, pages: list[int], num_positions: int) -> None:
        """Routes are not recorded."""

    def put(self, page: int, lockstep: Lockstep, row: int) -> None:
        """Keep a prompt's cache, and drop those whose groups are done."""
        self._of = {at: entry for at, entry in self._of.items() if not self._pool.is_free(at)}
        self._of[page] = lockstep, row

    def get(self, page: int) -> tuple[Lockstep, int]:
        return self._of[page]


class TransformersPrefill:
    def __init__(self, model: TransformersModel, caches: PromptCaches, max_tokens: int):
        self.num_tokens = 0
        """Prompt tokens of all forward passes."""
        self.num_forwards = 0
        self._model, self._caches, self._max_tokens = model, caches, max_tokens

    def __call__(self, chunks: list[PrefillChunk]) -> Tensor:
        """Return the logits after each prompt, fp32 [chunks, V]. The runner computes the later parts of a
        sample itself."""
        prompts = [chunk for chunk in chunks if chunk.first_position == 0]
        logits: dict[int, Tensor] = {}
        for some in _by_length(prompts, self._max_tokens):
            tokens_BT = torch.tensor([chunk.tokens_T for chunk in some], device=self._model.device)
            length = tokens_BT.shape[1]
            reports = any(chunk.on_hidden is not None for chunk in some)
            lockstep, logits_BTV = begin(self._model, tokens_BT, num_logits=length if reports else 1)
            self.num_forwards += 1
            self.num_tokens += tokens_BT.numel()
            for row, chunk in enumerate(some):
                self._caches.put(chunk.pages[0], lockstep, row)
                logits[id(chunk)] = logits_BTV[row, -1]
                if chunk.on_hidden is not None:
                    chunk.on_hidden(logits_BTV[row])
        return torch.stack([logits[id(chunk)] for chunk in prompts]) if prompts else torch.empty(0)


def _by_length(chunks: list[PrefillChunk], max_tokens: int) -> list[list[PrefillChunk]]:
    """Return runs of equal length with at most max_tokens tokens, or one chunk."""
    runs: list[list[PrefillChunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: len(chunk.tokens_T)):
        length = len(chunk.tokens_T)
        fits = runs and len(runs[-1][0].tokens_T) == length and (len(runs[-1]) + 1) * length <= max_tokens
        runs[-1].append(chunk) if fits else runs.append([chunk])
    return runs


class TransformersRunner:
    """The part of a DecodeRunner that Generation uses; a burst is one step, read at once."""

    max_steps, max_unread_bursts = 1, 0

    def __init__(self, model: TransformersModel, sampler: Sampler, caches: PromptCaches):
        self.num_steps, self.record_s, self.max_rows = 0, 0.0, 1 << 30
        self._model, self.sampler, self._caches = model, sampler, caches
        self._samples_B: list[LiveSample] = []
        self._keys_B: list[int] = []
        self._locksteps: list[tuple[Lockstep, list[LiveSample]]] = []
        self._unread: list[Burst] = []

    @property
    def num_unread_steps(self) -> int:
        return len(self._unread)

    num_unread_bursts = num_unread_steps

    def would_shrink(self, num_samples: int) -> bool:
        return 0 < num_samples < len(self._samples_B)

    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]:
        return self.sampler.sample(hidden_MD, keys_M, positions_M)

    def update_pages(self, samples: list[LiveSample]) -> None:
        """Do nothing: pages hold nothing."""

    def set_batch(self, samples_B: list[LiveSample], keys_B: list[int]) -> None:
        """Make these samples the rows; compute their tokens that the caches do not hold."""
        self._samples_B, self._keys_B = list(samples_B), list(keys_B)
        self.sampler.bind(self._samples_B)
        wanted, remaining = {id(s) for s in samples_B}, []
        for lockstep, members in self._locksteps:
            cached = [s.num_positions - 1 == lockstep.length for s in members]
            rows = [i for i, s in enumerate(members) if id(s) in wanted and cached[i]]
            if rows:
                lockstep.keep(rows)
                remaining.append((lockstep, [members[i] for i in rows]))
                wanted -= {id(members[i]) for i in rows}
        self._locksteps = remaining
        self._begin([s for s in samples_B if id(s) in wanted])

    def _begin(self, samples: list[LiveSample]) -> None:
        """Give samples rows of their own: copies of their prompts' caches, one Lockstep for each length."""
        by_cache: dict[tuple[Lockstep, int], list[LiveSample]] = {}
        for s in samples:
            lockstep, _ = self._caches.get(s.group.pages[0])
            by_cache.setdefault((lockstep, len(s.tokens_T)), []).append(s)
        for (prompts, num_tokens), members in by_cache.items():
            lockstep = prompts.copy_of([self._caches.get(s.group.pages[0])[1] for s in members])
            if num_tokens > 1:
                rest = [s.tokens_T[:-1] for s in members]
                lockstep.extend(torch.tensor(rest, device=self._model.device))
            self._locksteps.append((lockstep, members))

    @torch.no_grad()
    def launch(self, num_steps: int) -> None:
        assert num_steps == 1 and self._samples_B
        logits: dict[int, Tensor] = {}
        for lockstep, members in self._locksteps:
            newest_B1 = torch.tensor([[s.tokens_T[-1]] for s in members], device=self._model.device)
            logits |= {id(s): row for s, row in zip(members, lockstep.extend(newest_B1), strict=True)}
        device, logits_BV = self._model.device, torch.stack([logits[id(s)] for s in self._samples_B])
        keys_B = torch.tensor(self._keys_B, device=device)
        positions = [s.num_positions - 1 for s in self._samples_B]
        positions_B = torch.tensor(positions, dtype=torch.int32, device=device)
        tokens_B, logprobs_B = self.sampler.sample(logits_BV, keys_B, positions_B)
        self.num_steps += 1
        self._unread.append(Burst(self._samples_B, tokens_B[None].cpu(), logprobs_B[None].cpu(), None))

    def read(self) -> Burst:
        return self._unread.pop(0)
