"""The engine: draws samples from the learner's own decoder, continuously batched over a paged KV cache.

    scheduler.py   who runs, who waits, who is paused       pages.py      which page belongs to whom
    generation.py  one call: rearrange, decode, read        cache.py      the pages' memory
    prefill.py     prompts -> keys, values, hidden states   budget.py     how much memory they may take
    replay.py      known tokens by decode's own forward     score.py      exact logprobs of samples, by that
    runner.py      bursts of decode steps, CUDA graphs      runners.py    which forward and draw a call gets
    forward.py     one step's forward; hopper.py: fast      sliced.py     products whose bits are a row's own
    draw.py        hidden states -> tokens                  sampling.py   logits -> token and its logprob
    text.py        tokens -> text, stop strings             lot.py        samples, then branches of them

It holds no weights. Noise is whatever the decoder's norms hold during a call.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qerl.config import EngineConfig
from qerl.engine.branch_batch import BranchBatch, split_batches
from qerl.engine.detokenizer import Detokenizer
from qerl.engine.generation import Generation, Stats
from qerl.engine.kv_budget import free_bytes, kv_bytes, room_bytes
from qerl.engine.kv_cache import FP8, KVCache, page_bytes
from qerl.engine.page_pool import PagePool
from qerl.engine.prefill import Prefill
from qerl.engine.runner_cache import RunnerCache
from qerl.engine.scheduler import (
    LiveGroup,
    LiveSample,
    Scheduler,
    group_pages,
    kept_pages,
    num_pages,
    own_pages,
)
from qerl.engine.score import score
from qerl.errors import UserError
from qerl.models.adapter import publish
from qerl.models.decoder import Decoder
from qerl.types import Conversation, Group, Prompt, Sample, Sampling

# A cache as large as the memory allows stays if a new one would be little larger: its graphs go with it.
_WORTH_KEEPING = 0.9

Watch = Callable[[int, int, int, Sample | None], bool]
"""(the prompt's place in the call, sample index, newest token, the sample if that token ended it): sees every
token when the host reads it, and says whether the sample is to end there."""


class Engine:
    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        stop_token_ids: frozenset[int],
    ):
        self.version = 0
        self.stats = Stats()
        """Of the latest call of generate."""
        self._decoder, self.tokenizer, self._config = decoder, tokenizer, config
        self._stop_token_ids = stop_token_ids
        self._cache: KVCache | None = None
        self._kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else decoder.compute
        self._page_bytes = page_bytes(decoder.architecture, config.block_size, self._kv_dtype)
        self._runners = RunnerCache(decoder, config, stop_token_ids)

    @property
    def num_bytes(self) -> int:
        """Of the KV cache during a call: none before the first, then what the largest so far could use."""
        return 0 if self._cache is None else self._cache.num_bytes

    @property
    def notices(self) -> list[str]:
        """What its user should know before it samples."""
        found, obstacle = [], self._runners.obstacle
        if self._decoder.device.type == "cuda" and obstacle is not None:
            found.append(f"sampling is done by torch, without the decode kernels: {obstacle}")
        if self._runners.max_rows < self._config.max_num_seqs:
            found.append(
                f"{self._runners.max_rows} samples are decoded at once, not engine.max_num_seqs ="
                f" {self._config.max_num_seqs}: the kernels take no more"
            )
        return found

    def publish(self, version: int) -> None:
        """Sample from the learner's weights as they now are, under this version number."""
        publish(self._decoder)
        self._runners.publish()
        self.version = version

    def take_metrics(self) -> dict[str, float]:
        """Nothing that a step's log does not have from elsewhere."""
        return {}

    # Not inference_mode: a tensor that the decoder keeps from a call must serve the learner too.
    @torch.no_grad()
    def generate(
        self,
        prompts_P: list[Prompt],
        *,
        num_samples: int,
        sampling: Sampling,
        seed: int,
        step: int,
        watch: Watch | None = None,
        conversation: Conversation | None = None,
    ) -> list[Group]:
        """num_samples samples of each prompt, in the prompts' order; `watch` ends a turn by "stop"."""
        assert num_samples > 0
        start_s = time.perf_counter()
        text = Detokenizer(self.tokenizer, sampling.stop)
        groups = [self._group(i, prompt, num_samples, sampling) for i, prompt in enumerate(prompts_P)]
        if not groups:
            self.stats = Stats()
            return []
        self._take_noise(groups, prompts_P)
        with self._present_cache(groups, prompts_P) as cache:
            watcher = self._watcher(watch, text)
            generation = self._generation(
                cache, groups, prompts_P, text, sampling, seed, step, watcher, conversation
            )
            self.stats = generation.stats
            generation.run()
        self.stats.generate_s = time.perf_counter() - start_s
        return [self._finished(prompts_P[group.index], group, text) for group in groups]

    @torch.no_grad()
    def lots(
        self, prompts_P: list[Prompt], *, num_samples: int, sampling: Sampling, seed: int, step: int
    ) -> Iterator[BranchBatch]:
        """The prompts, in their order, in lots that can be sampled and then branched (lot.py). One is to be
        done with before the next is asked for; nothing else may be drawn or learned meanwhile."""
        text, self.stats = Detokenizer(self.tokenizer, sampling.stop), Stats()
        groups = [self._group(i, prompt, num_samples, sampling) for i, prompt in enumerate(prompts_P)]
        for group in groups:
            group.keeps_pages = True
        self._take_noise(groups, prompts_P)
        with self._present_cache(groups, prompts_P) as cache:
            for some in split_batches(groups, cache.num_pages, cache.page_tokens):
                generation = self._generation(cache, some, prompts_P, text, sampling, seed, step, None, None)
                yield BranchBatch(
                    some, generation, lambda group: self._finished(prompts_P[group.index], group, text)
                )
                self.stats += generation.stats

    @torch.no_grad()
    def score(self, groups: list[Group], *, sampling: Sampling) -> Tensor:
        """fp32 [tokens], group by group: each sampled token's logprob under the weights and the noise as they
        now are. Bit for bit what `generate` recorded, if it was under the same: for engine.exact alone."""
        assert self._config.exact and any(group.samples_G for group in groups)
        groups = [group for group in groups if group.samples_G]
        prompts_P, live = [group.prompt for group in groups], []
        for index, group in enumerate(groups):
            longest = max(len(sample.tokens_T) for sample in group.samples_G)
            each = dataclasses.replace(sampling, max_tokens=longest)
            live.append(self._group(index, group.prompt, len(group.samples_G), each))
        with self._present_cache(live, prompts_P) as cache:
            runner = self._runners.of(cache, sampling, self._most_pages(live))
            self._runners.publish()
            noise_rows = self._decoder.noise_table.rows(
                [(g.prompt.index, [s.sample_index for s in g.samples_G]) for g in groups]
            )
            scores_T = score(groups, noise_rows, cache, self._runners.replay(), runner.draw)
        samples, places, start = [s for group in groups for s in group.samples_G], [], 0
        for s in samples:
            places += [start + place for place in s.sampled_indices]
            start += len(s.tokens_T)
        return scores_T[torch.tensor(places, device=scores_T.device)]

    def _group(self, index: int, prompt: Prompt, num_samples: int, sampling: Sampling) -> LiveGroup:
        prompt_tokens, max_positions = len(prompt.tokens_T), self._decoder.architecture.max_positions
        if not 0 < prompt_tokens < max_positions:
            raise UserError(
                f"prompt {prompt.index} has {prompt_tokens} tokens;"
                f" the model takes 1 to {max_positions - 1} and a sample after them"
            )
        max_tokens = min(sampling.max_tokens, max_positions - prompt_tokens)
        group = LiveGroup(index=index, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
        group.samples_G = [LiveSample(group=group, sample_index=g) for g in range(num_samples)]
        return group

    def _take_noise(self, groups: list[LiveGroup], prompts_P: list[Prompt]) -> None:
        members = [(prompts_P[group.index].index, range(len(group.samples_G))) for group in groups]
        for group, (row, rows_G) in zip(groups, self._decoder.noise_table.rows(members), strict=True):
            group.noise_row = row
            for sample, sample_row in zip(group.samples_G, rows_G, strict=True):
                sample.noise_row = sample_row

    def _generation(
        self,
        cache: KVCache,
        groups: list[LiveGroup],
        prompts_P: list[Prompt],
        text: Detokenizer,
        sampling: Sampling,
        seed: int,
        step: int,
        watch: Callable[[LiveSample], bool] | None,
        conversation: Conversation | None,
    ) -> Generation:
        config = self._config
        runner = self._runners.of(cache, sampling, self._most_pages(groups))
        return Generation(
            cache,
            Scheduler(
                groups,
                PagePool(cache.num_pages),
                page_tokens=config.block_size,
                max_running=self._runners.max_rows,
            ),
            self._runners.replay()
            if config.exact
            else Prefill(self._decoder, cache, config.max_num_batched_tokens),
            runner,
            prompts_P,
            text,
            stop_token_ids=self._stop_token_ids,
            num_ahead=0 if runner.max_steps == 1 else 1,
            seed=seed,
            step=step,
            watch=watch,
            conversation=conversation,
        )

    def _most_pages(self, groups: list[LiveGroup]) -> int:
        """Of a prompt and its longest sample."""
        longest = max(group.prompt_tokens + group.max_tokens for group in groups)
        return num_pages(longest, self._config.block_size)

    @contextlib.contextmanager
    def _present_cache(self, groups: list[LiveGroup], prompts_P: list[Prompt]) -> Iterator[KVCache]:
        """The cache of earlier calls if it serves this one and there is room for it, else a new one."""
        held_bytes = 0 if self._cache is None else self._cache.held_bytes
        affordable = int(kv_bytes(self._config, self._decoder, held_bytes) / self._page_bytes)
        room = int(room_bytes(self._config, self._decoder, held_bytes) / self._page_bytes)
        least, useful = self._needed_pages(groups, prompts_P, affordable)
        serving = useful if useful <= affordable else max(least, _WORTH_KEEPING * affordable)
        if self._cache is not None and not serving <= self._cache.num_pages <= room:
            self._drop_cache()  # freed before another is made
        with contextlib.ExitStack() as stack:
            if self._cache is not None:
                try:
                    stack.enter_context(self._cache.present())
                except torch.OutOfMemoryError:  # engine.kv_cache_gb, or another process
                    self._drop_cache()
            if self._cache is None:
                self._cache = self._new_cache(min(affordable, useful), stack)
            try:
                yield self._cache
            except BaseException:
                self._drop_cache()  # it may hold NaNs
                raise

    def _needed_pages(
        self, groups: list[LiveGroup], prompts_P: list[Prompt], affordable: int
    ) -> tuple[int, int]:
        """(what the largest group needs to run at all, what all can hold at once)."""
        page_tokens, max_running = self._config.block_size, self._runners.max_rows
        least = kept = 0
        for group in groups:
            needed = group_pages(group.prompt_tokens, group.max_tokens, page_tokens)
            if group.keeps_pages:
                needed = kept_pages(group, page_tokens)
                kept += needed
            if needed > affordable:
                drawn = f"{len(group.samples_G)} samples and a branch" if group.keeps_pages else "a sample"
                raise UserError(
                    f"prompt {prompts_P[group.index].index} needs {needed} pages of KV cache"
                    f" ({_rounded_up_gb(needed * self._page_bytes)} GB)"
                    f" for its {group.prompt_tokens} tokens and {drawn} of {group.max_tokens};"
                    + _too_little(self._config, affordable, needed * self._page_bytes)
                )
            least = max(least, needed)
        prompts = sorted((num_pages(group.prompt_tokens, page_tokens) for group in groups), reverse=True)
        most_running = min(max_running, sum(len(group.samples_G) for group in groups))
        largest = max(own_pages(group.prompt_tokens, group.max_tokens, page_tokens) for group in groups)
        return least, kept + sum(prompts[:max_running]) + most_running * largest

    def _new_cache(self, num_pages: int, stack: contextlib.ExitStack) -> KVCache:
        """Present until the stack is closed."""
        decoder, page_tokens = self._decoder, self._config.block_size
        try:
            cache = KVCache(decoder.architecture, num_pages, page_tokens, self._kv_dtype, decoder.device)
            stack.enter_context(cache.present())
        except torch.OutOfMemoryError:
            raise UserError(
                f"the KV cache needs {_rounded_up_gb(num_pages * self._page_bytes)} GB, and the device has"
                f" {free_bytes(decoder.device) / 1e9:.2f} GB free: lower engine.kv_cache_gb or"
                " engine.max_num_seqs, or set engine.kv_cache_dtype to fp8"
            ) from None
        return cache

    def _drop_cache(self) -> None:
        self._cache = None
        self._runners.clear()

    def _finished(self, prompt: Prompt, group: LiveGroup, text: Detokenizer) -> Group:
        return Group(
            prompt=prompt,
            samples_G=[self._sample(s, text) for s in group.samples_G],
            prefix_tokens=0 if group.parent is None else group.prefix.stop + 1,
        )

    def _watcher(self, watch: Watch | None, text: Detokenizer) -> Callable[[LiveSample], bool] | None:
        if watch is None:
            return None

        def seen(s: LiveSample) -> bool:
            ended = None if s.finish is None else self._sample(s, text)
            return watch(s.group.index, s.sample_index, s.tokens_T[-1], ended)

        return seen

    def _sample(self, s: LiveSample, text: Detokenizer) -> Sample:
        assert s.finish is not None
        tokens_T = s.whole_T
        ends_with_stop_token = tokens_T[-1] in self._stop_token_ids
        return Sample(
            tokens_T=tokens_T,
            logprobs_T=s.whole_logprobs_T,
            text=text.of(tokens_T[:-1] if ends_with_stop_token else tokens_T),
            finish=s.finish,
            version=self.version,
            environment_spans=tuple(s.environment_spans),
            sample_index=(s.group.parent or s).sample_index,
        )


def _rounded_up_gb(num_bytes: float) -> float:
    return math.ceil(num_bytes / 1e5) / 1e4


def _too_little(config: EngineConfig, affordable: int, needed_bytes: float) -> str:
    if config.kv_cache_gb is not None:
        gb = _rounded_up_gb(needed_bytes)
        return f" engine.kv_cache_gb = {config.kv_cache_gb} holds {affordable}: raise it to {gb} or more"
    return f" what is free holds {affordable}: set engine.kv_cache_dtype to fp8, or lower sample.max_tokens"
