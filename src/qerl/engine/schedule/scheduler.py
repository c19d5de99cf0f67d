"""Schedule samples: decide which ones run and which one is preempted when KV pages run out. No tensors.

Samples have one fixed order: prompt by prompt, sample by sample. A group is admitted when no older sample
waits and a row is free, and some after it, for a prefill worth its launches: its prompt is prefilled and the
first token of all its samples is sampled. The samples then wait, join the running batch oldest first, some at
a time (can_fill_rows), and leave it when they finish. If a running sample needs a page and none is
free, the youngest running sample is preempted: it keeps its tokens, releases its pages, goes to the head of
the waiting queue, and its keys and values are recomputed when it is scheduled again. In a conversation, a
sample whose turn has ended is parked with its pages until no other sample can run. If pages run out, parked
samples lose theirs first, the youngest first. Two properties follow. Every running sample is older than every
waiting one, so no sample starves. And the oldest sample always progresses, because a group is admitted only
if the prompts of all admitted groups leave enough pages for the largest of their samples.

What a sample holds besides pages, pages of layers with a window and a slot of recurrent states, is counted
alike (cache_space.py): it is scheduled, and a group admitted, if there is enough of each.

A group may keep the pages of its finished samples so that they can be branched. The branches of a sample form
a group of their own: the sample's tokens before the pivot, except the last, count as this group's prompt and
are in pages already. The first decode step of a branch computes the last one.
"""

import collections
import math

from qerl.engine.schedule.cache_space import CacheSpace, Space
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample

MIN_PREFILL_TOKENS = 2048  # of a 7B model, the GPU waits for the launches of a prefill of fewer than 1,024
_AHEAD_TOKENS = 4 * MIN_PREFILL_TOKENS  # a quarter of the rows is admitted ahead for a prefill of 2,048
_JOINING_SHARE = 32  # the batch is rebuilt once one row in 32 can be filled, not for each sample


class Scheduler:
    """Call in a loop: allocate, schedule, admit, sample first tokens, schedule, decode, finish.

    One decode may be several steps: `steps_without_preemption` returns how many fit into the free pages, and
    `allocate` with that number allocates them. Only `allocate` for one step preempts."""

    def __init__(
        self,
        groups: list[LiveGroup],
        space: CacheSpace,
        *,
        max_num_seqs: int,
        max_admitted_tokens: int | None = None,
        min_prefill_tokens: int = MIN_PREFILL_TOKENS,
    ):
        """max_admitted_tokens: prompt tokens after which `admit` takes no further group. min_prefill_tokens:
        up to which it takes groups whose samples wait for rows."""
        self.space = space
        self.running: list[LiveSample] = []  # oldest first
        self.parked: list[LiveSample] = []
        self.num_preemptions = 0
        self.has_postponed = False
        """True if the latest `admit` left a group to the next one, to keep running samples from waiting."""
        self._max_num_seqs, self._max_admitted_tokens = max_num_seqs, max_admitted_tokens or math.inf
        self._min_prefill_tokens = min_prefill_tokens
        self._max_ahead = 0 if space.total.slots else max_num_seqs * min_prefill_tokens // _AHEAD_TOKENS
        self._not_admitted = collections.deque(groups)
        self._waiting: collections.deque[LiveSample] = collections.deque()  # oldest first
        self._admitted: list[LiveGroup] = []
        self._unbranched: list[LiveGroup | LiveSample] = []  # finished, but still hold what branches need

    @property
    def is_done(self) -> bool:
        return not (self.running or self.parked or self.has_waiting)

    @property
    def has_waiting(self) -> bool:
        """True if a sample waits or a group is not admitted."""
        return bool(self._waiting or self._not_admitted)

    @property
    def can_fill_rows(self) -> bool:
        """True if rows are free for one sample in 32 of a full batch, or for all that wait, if any does."""
        num_enough = min(self._max_num_seqs // _JOINING_SHARE, len(self._waiting) + len(self._not_admitted))
        return self.has_waiting and self._max_num_seqs - len(self.running) >= max(num_enough, 1)

    def add(self, groups: list[LiveGroup]) -> None:
        """Append groups, younger than all before."""
        self._not_admitted += groups

    def abort(self, groups: list[LiveGroup]) -> None:
        """Remove the groups' unfinished samples in any state."""
        for group in groups:
            if group in self._not_admitted:
                self._not_admitted.remove(group)
            else:
                self.finish([s for s in group.samples_G if s.finish is None])

    def steps_without_preemption(self, num_steps: int, num_launched: int = 0) -> int:
        """Return the largest n of num_steps, num_steps / 2, ..., 1, 0 for which allocate(num_launched + n)
        preempts no sample."""
        self.space.leave_windows(self.running)
        while num_steps > 0:
            missing, space = self.space.missing(self.running, num_launched + num_steps), self.space
            if space.has_free(missing) or missing <= space.free + space.releasable(self._between_turns()):
                return num_steps
            num_steps //= 2
        return 0

    def allocate(self, num_steps: int = 1) -> list[LiveSample]:
        """Allocate pages for the newest token of every running sample and num_steps - 1 more, oldest first.

        Return the samples that got a page. If there are too few pages, the youngest samples are preempted.
        """
        extended = []
        self.space.leave_windows(self.running)
        for sample in list(self.running):
            if not sample.is_running:
                break  # it is preempted, as are those after it
            missing = self.space.missing([sample], num_steps)
            if not missing:
                continue
            while sample.is_running and not self._reclaim(missing):
                self._preempt(self.running[-1])
            if sample.is_running:
                self.space.allocate(sample, num_steps)
                extended.append(sample)
        return extended

    def admit(self) -> list[LiveGroup]:
        """Allocate the prompts of groups to prefill now and return the groups; their samples then wait."""
        admitted, num_tokens, self.has_postponed = [], 0, False
        num_live, reserved = len(self.running), self.space.growth(self.running)
        prompts, longest = self.space.prompts(self._admitted)
        while not self._waiting and self._not_admitted:
            is_short = 0 < num_tokens < self._min_prefill_tokens
            if num_live >= self._max_num_seqs + self._max_ahead * is_short:
                break
            group = self._not_admitted[0]
            prompt = self.space.prompt(group)
            prompts += prompt
            longest = max(longest, self.space.own_pages(group))
            self.has_postponed = num_tokens >= self._max_admitted_tokens
            needed = prompt + self.space.first_sample(group) + reserved
            fits = self.space.has_free(needed) and self.space.can_finish(prompts, longest)
            if self.has_postponed or not fits:
                break
            self._not_admitted.popleft()
            self.space.allocate_prompt(group)
            group.num_unfinished = sum(s.finish is None for s in group.samples_G)
            num_tokens += group.prompt_tokens
            num_live += group.num_unfinished
            reserved += self.space.first_sample(group) * group.num_unfinished
            self._admitted.append(group)
            admitted.append(group)
        self._waiting.extend(s for group in admitted for s in group.samples_G if s.finish is None)
        return admitted

    def schedule(self) -> list[LiveSample]:
        """Move waiting samples to the running batch, oldest first, with pages up to their newest token.

        One page stays free for every running sample that may need another; otherwise the scheduled samples
        would be preempted as soon as their pages are computed.
        """
        num_running, reserved = len(self.running), self.space.growth(self.running)
        while self._waiting and len(self.running) < self._max_num_seqs:
            sample = self._waiting[0]
            reserved += self.space.growth([sample])
            if not self._reclaim(self.space.missing([sample]) + reserved, keep=sample):
                break
            self.space.allocate(sample)
            sample.is_running = True
            self.running.append(self._waiting.popleft())
        return self.running[num_running:]

    def finish(self, samples: list[LiveSample]) -> None:
        """Remove samples in any state; the last of a group also releases the prompt's pages."""
        for sample in samples:
            self.space.keep(sample)
            group = sample.group
            if not sample.is_running:
                (self.parked if sample in self.parked else self._waiting).remove(sample)
            if sample.is_running and group.keeps_pages:
                self._unbranched.append(sample)
                self.space.release_slot(sample)
                sample.is_running, sample.num_cached = False, 0
            else:
                self._release(sample)
            group.num_unfinished -= 1
            if group.num_unfinished == 0:
                self._admitted.remove(group)
                self.space.release_pages(group)
                if group.keeps_pages:
                    self._unbranched.append(group)
                else:
                    self.space.release_slot(group)
        self.running = [s for s in self.running if s.is_running]

    def park(self, samples: list[LiveSample]) -> None:
        """Park running or waiting samples whose turns have ended. A running one stays cached up to its newest
        token, unless its recurrent states hold later tokens too."""
        for sample in samples:
            if sample.is_running and sample.state and sample.has_overrun:
                self._release(sample)
                sample.has_overrun = False
            elif sample.is_running:
                sample.is_running, sample.num_cached = False, sample.num_positions - 1
                self.space.cut(sample)
            else:
                self._waiting.remove(sample)
        self.parked += samples
        self.running = [s for s in self.running if s.is_running]

    def resume(self, samples: list[LiveSample]) -> None:
        """Move parked samples to the waiting queue; the environment's tokens have been appended."""
        assert not self.running
        resumed = {id(s) for s in samples}
        self.parked = [s for s in self.parked if id(s) not in resumed]
        self._waiting = collections.deque(sorted([*self._waiting, *samples], key=lambda s: s.age))

    def branch(self, groups: list[LiveGroup]) -> None:
        """Admit branches of finished samples on their pages; release all other pages of finished samples."""
        for group in groups:
            assert group.parent is not None and group.num_parent_tokens < len(group.parent.tokens_T)
            self.space.share_prompt(group)
            group.num_unfinished = len(group.samples_G)
            self._admitted.append(group)
            self._waiting.extend(group.samples_G)
        for holder in self._unbranched:
            self.space.release(holder)
        self._unbranched.clear()

    def _reclaim(self, needed: Space, keep: LiveSample | None = None) -> bool:
        """Release samples between turns except `keep`, youngest first, until the needed space is free; return
        True if it is."""
        if self.space.has_free(needed):
            return True
        for sample in sorted(self._between_turns(), key=lambda s: s.age, reverse=True):
            if sample is not keep and not self.space.has_free(needed):
                self._release(sample)
        return self.space.has_free(needed)

    def _between_turns(self) -> list[LiveSample]:
        return [*self._waiting, *self.parked]

    def _preempt(self, sample: LiveSample) -> None:
        self.running.remove(sample)
        self._release(sample)
        self._waiting.appendleft(sample)
        self.num_preemptions += 1

    def _release(self, sample: LiveSample) -> None:
        self.space.release(sample)
        sample.is_running, sample.num_cached = False, 0
