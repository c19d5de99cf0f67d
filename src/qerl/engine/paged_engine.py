"""Sampling engine: continuous batching over a paged KV cache, on the learner's own decoder.

    paged_engine.py     KV cache, branches, scores     local_engine.py         public methods of all engines
    generation.py       one call: schedule, decode     transformers_engine.py  transformers' code and caches
    live_batch.py       requests join and leave        branch_batch.py         samples, then branches of them
    score.py            exact logprobs of samples      stats.py                counts and times of a call

    schedule/           who runs, waits and is preempted (scheduler.py) in which space (cache_space.py)
    cache/              memory of pages and states; how much a call needs, and may take
    sampling/           hidden states -> tokens, logprobs, text
    prefill/            prompts -> hidden states, in chunks
    decode/             bursts of steps, their forward, kernels and CUDA graphs

The engine owns no weights. The noise is whatever the decoder's norms contain during a call.
"""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.algo.batches import batches
from qerl.config import EngineConfig
from qerl.cost.cache import FP8, slot_bytes
from qerl.cost.prefill import batched_tokens, min_prefill_tokens
from qerl.engine.branch_batch import BranchBatch
from qerl.engine.cache.budget import free_bytes, max_cache_bytes, new_cache_bytes
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.cache.size import CacheSize, rounded_up_gb
from qerl.engine.cache.state_cache import StateCache
from qerl.engine.decode.runner import DecodeRunner
from qerl.engine.decode.runner_cache import RunnerCache
from qerl.engine.generation import Generation, StoppingCriteria
from qerl.engine.local_engine import LocalEngine, NewGeneration
from qerl.engine.prefill.prefill import Prefill
from qerl.engine.sampling.row_sampler import RowSampler
from qerl.engine.schedule.cache_space import CacheSpace, Space
from qerl.engine.schedule.carried_cache import HostPieces
from qerl.engine.schedule.live_sample import LiveGroup
from qerl.engine.schedule.page_pool import num_pages
from qerl.engine.schedule.scheduler import Scheduler
from qerl.engine.score import score
from qerl.engine.stats import Stats
from qerl.errors import UserError
from qerl.kernels.runtime.compile_tally import CompileReport
from qerl.kernels.runtime.gpu_memory import memory_bytes
from qerl.models.adapter_bank import AdapterBank
from qerl.models.decoder import Decoder
from qerl.models.device import Kernels
from qerl.types import GenerateRequest, Group, Sampling

# A cache limited by memory is kept unless a new one is clearly larger: its CUDA graphs would be lost.
_WORTH_KEEPING = 0.9


class PagedEngine(LocalEngine):
    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        stop_token_ids: frozenset[int],
    ):
        gpu_bytes = memory_bytes(decoder.device)
        super().__init__(
            decoder,
            tokenizer,
            stop_token_ids=stop_token_ids,
            max_num_batched_tokens=batched_tokens(config, decoder.architecture, gpu_bytes),
        )
        self._decoder, self._config = decoder, config
        self._min_prefill_tokens = min_prefill_tokens(config, decoder.architecture, gpu_bytes)
        self._cache: KVCache | None = None
        self._host = HostPieces(decoder.device)
        self._kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else decoder.compute
        self._runners = RunnerCache(decoder, config, stop_token_ids)
        self.max_rows = self._runners.max_rows
        self._size = CacheSize.of(
            decoder.architecture,
            config,
            self._kv_dtype,
            slot_bytes=slot_bytes(decoder.architecture, decoder.compute),
            max_rows=self._runners.max_rows,
        )

    @property
    def num_bytes(self) -> int:
        """Size of the KV cache during a call; 0 before the first call."""
        return 0 if self._cache is None else self._cache.num_bytes

    @property
    def kernels(self) -> Kernels:
        """The kernels that decode steps use."""
        return "torch" if self._runners.obstacle is not None else self._runners.kernels

    def bank_obstacle(self, bank: AdapterBank) -> str | None:
        return self._runners.bank_obstacle(bank)

    @property
    def notices(self) -> list[str]:
        """Messages for the user about limits of this engine."""
        notices, obstacle = [], self._runners.obstacle
        if self._decoder.device.type == "cuda" and obstacle is not None:
            notices.append(f"decode kernels unavailable ({obstacle}): falling back to PyTorch")
        limit = self._config.max_num_seqs
        if limit is not None and self._runners.max_rows < limit:
            notices.append(
                f"the decode kernels run at most {self._runners.max_rows} samples at once,"
                f" below engine.max_num_seqs = {limit}"
            )
        return notices

    def compile_report(self) -> CompileReport | None:
        """Return what was compiled before the first decode step; None if nothing was."""
        return self._runners.compiled

    def wait_compiled(self) -> None:
        """Wait until nothing is compiled any more; steps of any number of rows may run meanwhile."""
        self._runners.wait_compiled()

    def expect(self, num_positions: int) -> None:
        super().expect(num_positions)
        self._runners.expected_pages = num_pages(self._expected_positions, self._config.block_size)

    def publish(self, version: int) -> None:
        super().publish(version)
        self._runners.publish()

    @contextlib.contextmanager
    def open(self, groups: list[LiveGroup], sampling: Sampling | None) -> Iterator[NewGeneration]:
        with self._present_cache(groups) as cache:
            num_first = max(sum(len(group.samples_G) for group in groups), 1)
            runner = self._runners.of(cache, sampling, self._max_pages(groups), num_first)
            yield functools.partial(self._generation, cache, runner)

    @torch.no_grad()
    def branch_batches(self, request: GenerateRequest) -> Iterator[BranchBatch]:
        """Yield the prompts, in order, in batches that can be sampled and then branched (branch_batch.py).

        Finish with a batch before taking the next one. Do not generate or learn meanwhile.
        """
        stopping, self.stats = self.stopping(request.sampling.stop), Stats()
        groups = self._new_groups(request)
        for group in groups:
            group.keeps_pages = True
        with self._present_cache(groups) as cache:
            # a batch leaves a slot for a sample: its prompts keep theirs until they are branched
            share = -(-cache.num_pages // (cache.space.slots - 1)) if cache.space.slots else 0
            for batch in batches(
                groups, lambda g: max(self._branching_pages(g, cache), share), cache.num_pages
            ):
                pages, num_first = self._max_pages(batch), sum(len(group.samples_G) for group in batch)
                runner = self._runners.of(cache, request.sampling, pages, num_first)
                generation = self._generation(cache, runner, batch, stopping)
                yield BranchBatch(batch, generation, lambda group: self._to_group(group, stopping))
                self.stats += generation.stats

    @torch.no_grad()
    def score(self, groups: list[Group], *, sampling: Sampling, by_requests: bool = False) -> Tensor:
        """Return each sampled token's logprob under the current weights and noise: fp32 [tokens], group by
        group. Bit for bit what `generate` recorded under the same weights and noise, or with by_requests a
        LiveBatch. Needs engine.exact."""
        assert self._config.exact and any(group.samples_G for group in groups)
        groups, live = [group for group in groups if group.samples_G], []
        for index, group in enumerate(groups):
            longest = max(len(sample.tokens_T) for sample in group.samples_G)
            live.append(self._new_group(index, group.prompt, len(group.samples_G), longest))
        with self._present_cache(live) as cache:
            shared = None if by_requests else sampling
            runner = self._runners.of(cache, shared, self._max_pages(live), self.max_rows)
            if isinstance(runner.sampler, RowSampler):
                runner.sampler.bind_scores(sampling.temperature)
            self._runners.publish()
            noise_rows = self._decoder.noise_table.rows(
                [(g.prompt.index, [s.sample_index for s in g.samples_G]) for g in groups]
            )
            scores_T = score(groups, noise_rows, cache, self._runners.teacher_forcing(), runner.sampler)
        samples, indices, start = [s for group in groups for s in group.samples_G], [], 0
        for s in samples:
            indices += [start + index for index in s.sampled_indices]
            start += len(s.tokens_T)
        return scores_T[torch.tensor(indices, device=scores_T.device)]

    def _generation(
        self,
        cache: KVCache,
        runner: DecodeRunner,
        groups: list[LiveGroup],
        stopping: StoppingCriteria,
        max_admitted_tokens: int | None = None,
        kept_fraction: float = 0.0,
    ) -> Generation:
        has_only_pages = cache.states is None and cache.windowed is None
        space = CacheSpace(
            cache.space,
            self._config.block_size,
            window=self._size.window,
            max_kept_pages=int(kept_fraction * cache.num_pages) if has_only_pages else 0,
        )
        rows = self._runners.max_rows
        generation = Generation(
            cache,
            Scheduler(
                groups,
                space,
                max_num_seqs=rows,
                max_admitted_tokens=max_admitted_tokens,
                min_prefill_tokens=self._min_prefill_tokens,
            ),
            self._runners.teacher_forcing()
            if self._config.exact
            else Prefill(self._decoder, cache, self._max_num_batched_tokens),
            runner,
            stopping,
        )
        generation.stats.compile_s = self._runners.take_compile_s()
        return generation

    def _branching_pages(self, group: LiveGroup, cache: KVCache) -> int:
        """Return the pages that a branched group takes: those it needs, or as large a share of all pages as
        it needs of the window pages."""
        needed = self._size.group_pages(group)
        if not cache.space.windowed:
            return needed.pages
        return max(needed.pages, -(-needed.windowed * cache.num_pages // cache.space.windowed))

    def _max_pages(self, groups: list[LiveGroup]) -> int:
        """Return the maximum number of pages of a prompt and one of its samples."""
        longest = max(group.prompt_tokens + group.max_tokens for group in groups)
        return num_pages(longest, self._config.block_size)

    @contextlib.contextmanager
    def _present_cache(self, groups: list[LiveGroup]) -> Iterator[KVCache]:
        """Yield the cache of earlier calls if it is large enough and fits into memory, else a new one."""
        budget = self._config, self._decoder, 0 if self._cache is None else self._cache.resident_bytes
        size = self._size
        num_slots, left_bytes = size.affordable(groups, new_cache_bytes(*budget))
        required, useful = size.needed_pages(groups, left_bytes)
        # A cache for the longest call that is expected: a larger one later would drop the recorded graphs.
        share = max(self._runners.expected_pages / self._max_pages(groups), 1.0)
        chosen = size.choose(left_bytes, required, useful * share)
        enough = useful if useful <= chosen else required.at_least(chosen * _WORTH_KEEPING)
        slots = Space(slots=num_slots)
        if self._cache is not None:
            present = self._cache.space
            if not enough + slots <= present or size.bytes_of(present) > max_cache_bytes(*budget):
                self._drop_cache()  # freed before another is made
        with contextlib.ExitStack() as stack:
            if self._cache is not None:
                try:
                    stack.enter_context(self._cache.present())
                except torch.OutOfMemoryError:  # kv_cache_gb is too large, or another process uses the GPU
                    self._drop_cache()
            if self._cache is None:
                self._cache = self._new_cache(chosen + slots, stack)
            try:
                yield self._cache
            except BaseException:
                self._drop_cache()  # it may contain NaNs
                raise

    def _new_cache(self, space: Space, stack: contextlib.ExitStack) -> KVCache:
        """Make a cache that is present until the stack is closed."""
        decoder, states = self._decoder, None
        try:
            if space.slots:
                states = StateCache(decoder.architecture, space.slots, decoder.compute, decoder.device)
            place = self._config.block_size, self._kv_dtype, decoder.device
            num_windowed = None if self._size.window is None else space.windowed
            cache = KVCache(decoder.architecture, space.pages, *place, states, num_windowed, self._host)
            stack.enter_context(cache.present())
        except torch.OutOfMemoryError:
            num_bytes = self._size.bytes_of(space)
            raise UserError(
                f"the KV cache needs {rounded_up_gb(num_bytes)} GB, and the device has"
                f" {free_bytes(decoder.device) / 1e9:.2f} GB free: lower engine.kv_cache_gb or"
                " engine.max_num_seqs, or set engine.kv_cache_dtype to fp8"
            ) from None
        return cache

    def _drop_cache(self) -> None:
        self._cache = None
        self._runners.clear()
