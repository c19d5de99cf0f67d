"""Generate the samples of one call.

    reschedule     preempt, schedule and admit samples, and prefill what they need (prefill.py)
    answer turns   ask the conversation how the parked samples continue, once no other sample can run
    decode         a burst of decode steps for the running samples (decode/runner.py); read the previous one

A token's randomness is a function of (seed, step, prompt.index, sample_index, token index in the sample), and
for a branch of (seed, step, prompt.index, the sample's index, branch index, token index in the branch). The
result does not depend on batches, pages, bursts or preemptions (tests/engine/test_engine.py,
test_branch_batch.py), unless a cache is carried over a change of weights: preempted samples lose theirs.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from qerl.engine.cache.state_cache import StateCache
from qerl.engine.decode.runner import FIRST_TOKEN_ROWS, Burst
from qerl.engine.prefill.chunk import PrefillChunk
from qerl.engine.sampling.detokenizer import Detokenizer
from qerl.engine.sampling.sampler import Sampler
from qerl.engine.schedule.cache_space import HasPages
from qerl.engine.schedule.carried_cache import CachedSpan, CarriedCache
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.engine.schedule.scheduler import Scheduler
from qerl.engine.stats import Stats
from qerl.errors import UserError
from qerl.types import Conversation, Turn

_Holder = TypeVar("_Holder", LiveGroup, LiveSample)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoppingCriteria:
    """Conditions that end a turn before its maximum length, and the conversation that goes on after it."""

    stop_token_ids: frozenset[int]
    detokenizer: Detokenizer
    """With the stop strings."""
    on_token: Callable[[LiveSample], bool] | None = None
    """Called for every sampled token; True ends the sample's turn."""
    skips_on_token: Callable[[LiveSample, list[int]], bool] | None = None
    """Called with the next tokens of a sample, none of which ends its turn: True if none of them needs
    on_token, which then is not called for them. None: all need it."""
    on_failure: Callable[[LiveSample, UserError], None] | None = None
    """Called for a sample that cannot go on, which then ends alone; None: the call ends with that error."""
    conversation: Conversation | None = None

    def text(self, tokens_T: list[int]) -> str:
        """Return the text before the stop token or string."""
        end = -1 if tokens_T[-1] in self.stop_token_ids else None
        return self.detokenizer.decode(tokens_T[:end])


class SampleCaches(Protocol):
    """A KVCache, which documents these methods, or the PromptCaches of transformers' model."""

    @property
    def states(self) -> StateCache | None: ...
    def copy_partial_pages(self, copies: list[tuple[int, HasPages, HasPages]]) -> None: ...
    def read_routes(self, pages: list[int], num_positions: int) -> bytes | None: ...
    def carry(self, spans: list[CachedSpan]) -> list[CarriedCache | None]: ...
    def restore(self, carried: CarriedCache, span: CachedSpan) -> None: ...


class PromptForward(Protocol):
    """A Prefill, a TeacherForcing, or a TransformersPrefill."""

    num_tokens: int
    """Rows of all forwards."""
    num_forwards: int

    def __call__(self, chunks: list[PrefillChunk]) -> Tensor:
        """Compute the chunks; return what the sampler takes, of their last rows."""
        ...


class StepRunner(Protocol):
    """A DecodeRunner, or a TransformersRunner."""

    num_steps: int
    record_s: float
    sampler: Sampler

    @property
    def max_rows(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def max_unread_bursts(self) -> int: ...
    @property
    def num_unread_steps(self) -> int: ...
    @property
    def num_unread_bursts(self) -> int: ...
    def would_shrink(self, num_samples: int) -> bool: ...
    def sample(self, hidden_MD: Tensor, keys_M: Tensor, positions_M: Tensor) -> tuple[Tensor, Tensor]: ...
    def set_batch(self, samples_B: list[LiveSample], keys_B: list[int]) -> None: ...
    def update_pages(self, samples: list[LiveSample]) -> None: ...
    def launch(self, num_steps: int) -> None: ...
    def read(self) -> Burst: ...


def _chunk(holder: LiveGroup | LiveSample, tokens_T: list[int], first: int, **others: Any) -> PrefillChunk:
    """Return a chunk of tokens from position `first` on, in the holder's pages and state."""
    pages, row, state, windowed = holder.pages, holder.noise_row, holder.state, holder.window_pages
    return PrefillChunk(tokens_T, first, pages, row, state=state, window_pages=windowed, **others)


class Generation:
    def __init__(
        self,
        cache: SampleCaches,
        scheduler: Scheduler,
        prefill: PromptForward,
        runner: StepRunner,
        stopping: StoppingCriteria,
    ):
        self.stats = Stats()
        self._cache, self._scheduler, self._prefill, self._runner = cache, scheduler, prefill, runner
        self._stopping, self._stop_token_ids = stopping, stopping.stop_token_ids
        self._on_token, self._conversation = stopping.on_token, stopping.conversation
        self._needs_reschedule, self._start_s = True, 0.0

    def branch(self, groups: list[LiveGroup]) -> None:
        """Add branches of samples that the previous run finished; the next run generates them."""
        self._scheduler.branch(groups)
        has_states = self._cache.states is not None  # those of a branch's own tokens are computed again
        for group in groups:
            self.stats.reused_tokens += group.prompt_tokens - has_states * group.num_parent_tokens

    @property
    def is_done(self) -> bool:
        return self._scheduler.is_done

    @property
    def num_used_pages(self) -> int:
        return self._scheduler.space.pages.num_used

    @property
    def num_pages(self) -> int:
        return self._scheduler.space.pages.num_pages

    @property
    def num_prefilled(self) -> int:
        """Rows of all prefills so far."""
        return self._prefill.num_tokens

    def forget(self, episodes: list[object]) -> None:
        """Keep no pages for these episodes any more."""
        self._scheduler.space.kept_pages.forget(episodes)

    def add(self, groups: list[LiveGroup]) -> None:
        """Add groups that start at the next burst, if there is room; they are younger than all before."""
        self._scheduler.add(groups)
        self._needs_reschedule = True

    def carry(self, groups: list[LiveGroup]) -> None:
        """Copy what the cache holds of the groups' unfinished samples, for the call that continues them."""
        self._read_all()
        admitted = [group for group in groups if group.pages]
        self._copy_out(admitted)
        for group in admitted:
            if group.carried is None:  # samples are computed again with their prompt
                for s in group.samples_G:
                    s.carried = None
        self._copy_out([s for g in admitted if g.carried is not None for s in g.samples_G if s.is_running])

    def _copy_out(self, holders: Sequence[LiveGroup | LiveSample]) -> None:
        for holder, carried in zip(holders, self._cache.carry([h.span for h in holders]), strict=True):
            holder.carried = carried

    def abort(self, groups: list[LiveGroup]) -> None:
        """Remove the groups' unfinished samples, once the bursts that compute them have been read."""
        self._read_all()
        self._scheduler.abort(groups)
        self._needs_reschedule = True

    def run(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Generate until every sample is finished, or is_enough, called after each burst, returns True."""
        start_s, scheduler, runner = time.perf_counter(), self._scheduler, self._runner
        self._start_s, runner.num_steps, runner.record_s = start_s, 0, 0.0
        while not (scheduler.is_done or is_enough()):
            self.step()
        self.stats.num_preemptions = scheduler.num_preemptions
        self.stats.decode_forwards += runner.num_steps
        self.stats.record_s += runner.record_s
        self.stats.prefill_tokens = self._prefill.num_tokens
        self.stats.prefill_forwards = self._prefill.num_forwards
        self.stats.generate_s += time.perf_counter() - start_s

    def step(self) -> None:
        """Launch a burst, read one, or rebuild the running batch."""
        scheduler, runner, num_steps = self._scheduler, self._runner, 0
        if not self._needs_reschedule:
            num_steps = scheduler.steps_without_preemption(self._steps_left(), runner.num_unread_steps)
        if num_steps > 0:
            self._decode(num_steps)
        elif runner.num_unread_bursts and not self._can_reschedule:
            self._read()
        else:
            self._reschedule()

    @property
    def _can_reschedule(self) -> bool:
        """True if the batch can be rebuilt while a burst runs: no sample of it is preempted or resumed."""
        scheduler, num_unread = self._scheduler, self._runner.num_unread_steps
        has_running = self._needs_reschedule and bool(scheduler.running)
        return has_running and scheduler.steps_without_preemption(1, num_unread) > 0

    def _steps_left(self) -> int:
        """Return the maximum length of the next burst: until the longest running sample must have ended."""
        left = [s.max_tokens - len(s.tokens_T) for s in self._scheduler.running]
        return min(max(left, default=0) - self._runner.num_unread_steps, self._runner.max_steps)

    def _decode(self, num_steps: int) -> None:
        runner, scheduler = self._runner, self._scheduler
        runner.update_pages(scheduler.allocate(runner.num_unread_steps + num_steps))
        self._note_pages()
        runner.launch(num_steps)
        self.stats.unfused_tokens += num_steps * runner.sampler.num_unfused_rows
        while runner.num_unread_bursts > runner.max_unread_bursts:
            self._read()

    def _reschedule(self) -> None:
        """Rebuild the running batch. Samples of an unread burst go on where it ends."""
        start_s, scheduler = time.perf_counter(), self._scheduler
        scheduler.allocate(self._runner.num_unread_steps + 1)
        self._fill_pages(scheduler.schedule())
        admitted = scheduler.admit()
        if admitted:
            self._start(admitted)
            self._fill_pages(scheduler.schedule())
        assert scheduler.running or admitted or scheduler.parked, "no sample can run"
        self._note_pages()
        running = scheduler.running
        self._runner.set_batch(running, [self._key(s) for s in running])
        self._needs_reschedule = not running
        self.stats.prefill_s += time.perf_counter() - start_s
        if not (running or admitted):
            self._answer_turns(list(scheduler.parked))

    def _answer_turns(self, samples: list[LiveSample]) -> None:
        """Append the environment's tokens to samples that continue, and finish the others."""
        assert self._conversation is not None
        answers = self._conversation.answer([self._turn(s) for s in samples])
        finished, continued = [], []
        for s, answer_T in zip(samples, answers, strict=True):
            if answer_T is None:
                finished.append(s)
                continue
            start = len(s.tokens_T)
            assert 0 < len(answer_T) < s.total_tokens - start
            s.environment_spans.append(range(start, start + len(answer_T)))
            s.tokens_T += answer_T
            s.finish = None
            self._limit_turn(s)
            continued.append(s)
        self._scheduler.finish(finished)
        self._scheduler.resume(continued)

    def _turn(self, s: LiveSample) -> Turn:
        assert s.finish is not None
        tokens_T = list(s.turn_tokens_T)
        return Turn(
            index=s.group.index,
            sample_index=s.sample_index,
            tokens_T=tokens_T,
            text=self._stopping.text(tokens_T),
            finish=s.finish,
            num_left=s.total_tokens - len(s.tokens_T),
        )

    def _limit_turn(self, s: LiveSample) -> None:
        """Set the maximum length of the turn that starts now."""
        s.max_tokens, conversation = s.total_tokens, self._conversation
        if conversation is not None and conversation.turn_tokens is not None:
            s.max_tokens = min(len(s.tokens_T) + conversation.turn_tokens, s.max_tokens)

    def keep_routes(self, s: LiveSample) -> None:
        """Store the experts of the sample's rows so far in s.routes."""
        s.routes = self._cache.read_routes(s.pages or s.group.pages, s.num_positions - 1)

    def _end_turns(self, samples: list[LiveSample]) -> None:
        """Park the samples for their environments; without a conversation they are finished."""
        for s in samples:
            self.keep_routes(s)
            self.stats.finish_s.append(time.perf_counter() - self._start_s)
        (self._scheduler.finish if self._conversation is None else self._scheduler.park)(samples)

    def _start(self, groups: list[LiveGroup]) -> None:
        """Prefill the prompts, unless they were carried, and sample the first token of all their samples."""
        groups = self._restore(groups)
        if not groups:
            return
        self.stats.reused_tokens += sum(g.num_reused for g in groups)
        chunks = [
            _chunk(g, g.prompt.tokens_T[g.num_reused :], g.num_reused, on_hidden=g.on_prompt_hidden)
            for g in groups
        ]
        hidden_PD = self._prefill(chunks)
        pairs = [(row, s) for row, group in enumerate(groups) for s in group.samples_G if not s.tokens_T]
        for _, s in pairs:
            self._limit_turn(s)
        size = min(FIRST_TOKEN_ROWS, self._runner.max_rows)
        for first in range(0, len(pairs), size):
            rows, samples = zip(*pairs[first : first + size], strict=True)
            self._sample_first(hidden_PD[torch.tensor(rows, device=hidden_PD.device)], list(samples))

    def _sample_first(self, hidden_MD: Tensor, samples: list[LiveSample]) -> None:
        device = hidden_MD.device
        keys_M = torch.tensor([self._key(s) for s in samples], device=device)
        positions = [s.group.prompt_tokens - 1 for s in samples]
        positions_M = torch.tensor(positions, dtype=torch.int32, device=device)
        self._runner.sampler.bind(samples)
        self.stats.unfused_tokens += self._runner.sampler.num_unfused_rows
        outputs = self._runner.sample(hidden_MD, keys_M, positions_M)
        for s, token, logprob in zip(samples, *(values.tolist() for values in outputs), strict=True):
            self._append(s, token, logprob)
        self._end_turns([s for s in samples if s.finish is not None])

    def _fill_pages(self, scheduled: list[LiveSample]) -> None:
        """Restore carried samples; copy the partial page and states of new samples' prompts; recompute what
        preempted samples had cached."""
        scheduled = self._restore(scheduled)
        new = [s for s in scheduled if not s.num_cached]
        self._cache.copy_partial_pages([(s.group.prompt_tokens, s.group, s) for s in new])
        if (states := self._cache.states) is not None:
            states.copy([(s.group.state, s.state) for s in new])
            self._go_to_pivots([s for s in new if s.group.num_parent_tokens], states)
        resumed = [s for s in scheduled if len(s.tokens_T) > 1]
        if resumed:
            self._prefill([self._uncached(s) for s in resumed])

    def _restore(self, holders: list[_Holder]) -> list[_Holder]:
        """Write the carried contents of these into their pages, once; return the others."""
        others = [holder for holder in holders if holder.carried is None]
        for holder in holders:
            if holder.carried is not None:
                self._cache.restore(holder.carried, holder.span)
                self.stats.reused_tokens += len(holder.span.positions)
                holder.carried = None
        return others

    def _go_to_pivots(self, branches: list[LiveSample], states: StateCache) -> None:
        """Advance the states of branches from the prompt's end to the pivot, once for each group."""
        first_of = {s.group: s for s in reversed(branches)}
        if not first_of:
            return
        chunks = []
        for group, s in first_of.items():
            parent, num_tokens = group.parent, group.num_parent_tokens
            assert parent is not None
            chunks.append(_chunk(s, parent.tokens_T[:num_tokens], parent.group.prompt_tokens, is_cached=True))
        self._prefill(chunks)
        states.copy([(first_of[s.group].state, s.state) for s in branches if s is not first_of[s.group]])

    @staticmethod
    def _uncached(s: LiveSample) -> PrefillChunk:
        """Return the tokens that are not cached, except the newest."""
        first = s.num_cached or s.group.prompt_tokens
        tokens_T = s.tokens_T[first - s.group.prompt_tokens : -1]
        return _chunk(s, tokens_T, first, prompt_window_pages=s.group.window_pages)

    def _read_all(self) -> None:
        while self._runner.num_unread_bursts:
            self._read()

    def _read(self) -> None:
        """Append the tokens of the oldest unread burst and end the turns that it completed."""
        ended, is_host_stop = self._append_burst(self._runner.read())
        if is_host_stop:  # the device keeps writing to their pages until the next batch is set
            self._needs_reschedule = True
            while self._runner.num_unread_bursts:
                ended += self._append_burst(self._runner.read())[0]
        self._end_turns(ended)
        self._needs_reschedule |= self._scheduler.has_postponed
        if ended:
            num_left = len(self._scheduler.running)
            is_better = self._scheduler.can_fill_rows or self._runner.would_shrink(num_left)
            self._needs_reschedule = self._needs_reschedule or not num_left or is_better

    def _append_burst(self, burst: Burst) -> tuple[list[LiveSample], bool]:
        """Return (samples that ended in this burst, True if one ended by a string: only the host sees it)."""
        ended, is_host_stop, device_stops = [], False, self._stop_token_ids | burst.stop_token_ids
        columns = zip(burst.samples_B, burst.tokens_WB.T.tolist(), burst.logprobs_WB.T.tolist(), strict=True)
        for s, tokens_W, logprobs_W in columns:
            if s.finish is not None or self._extend(s, tokens_W, logprobs_W):
                continue
            for step, (token, logprob) in enumerate(zip(tokens_W, logprobs_W, strict=True), 1):
                self._append(s, token, logprob)
                if s.finish is not None:
                    ended.append(s)
                    is_stopped_here = s.finish == "stop" and token not in device_stops
                    num_later = len(tokens_W) - step + self._runner.num_unread_steps
                    s.has_overrun = is_stopped_here and num_later > 0
                    is_host_stop |= is_stopped_here
                    break
        return ended, is_host_stop

    def _extend(self, s: LiveSample, tokens_W: list[int], logprobs_W: list[float]) -> bool:
        """Append a burst's tokens at once and return True, if none of them can end the sample."""
        may_end = len(s.tokens_T) + len(tokens_W) >= s.max_tokens or self._stopping.detokenizer.stop
        if may_end or not self._stop_token_ids.isdisjoint(tokens_W) or not math.isfinite(sum(logprobs_W)):
            return False
        skips = self._stopping.skips_on_token
        if self._on_token is not None and not (skips is not None and skips(s, tokens_W)):
            return False
        s.tokens_T += tokens_W
        s.logprobs_T += logprobs_W
        self.stats.num_tokens += len(tokens_W)
        return True

    def _append(self, s: LiveSample, token: int, logprob: float) -> None:
        if not math.isfinite(logprob) and s.failure is None:
            at = f"prompt {s.group.prompt.index}: the model's logits after {s.num_positions} tokens"
            s.failure = UserError(f"{at} are not finite")
        if s.failure is not None:
            if (on_failure := self._stopping.on_failure) is None:
                raise s.failure
            s.finish = "stop"
            on_failure(s, s.failure)
            return
        s.tokens_T.append(token)
        s.logprobs_T.append(logprob)
        s.finish = self._finish(s)
        if self._on_token is not None and self._on_token(s) and s.finish is None:
            s.finish = "stop"
        self.stats.num_tokens += 1

    def _finish(self, s: LiveSample) -> Literal["stop", "length"] | None:
        if s.tokens_T[-1] in self._stop_token_ids or self._stopping.detokenizer.has_stop(s.turn_tokens_T):
            return "stop"
        return "length" if len(s.tokens_T) == s.max_tokens else None

    def _key(self, s: LiveSample) -> int:
        return self._runner.sampler.key((*s.group.coordinates, s.sample_index), s.group.prompt_tokens)

    def _note_pages(self) -> None:
        stats, windows = self.stats, self._scheduler.space.windows
        stats.peak_pages = max(stats.peak_pages, self.num_used_pages)
        stats.peak_window_pages = max(stats.peak_window_pages, windows.pool.num_used)
