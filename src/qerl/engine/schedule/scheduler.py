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

The pages of a sample, in the order of its positions:

    the prompt's full pages, shared by reference | a copy of its partial page | pages for sampled tokens

If layers have recurrent states (kv_cache.py), a group also has a slot for the states after its prompt, and
each running or parked sample one of its own. A preempted sample loses its slot: its states start from the
group's again. A group is admitted only if it leaves a slot for a sample.

Layers with a window may have pages of their own, of which a sample holds those that its later queries see
(window_pages.py). Both kinds are counted alike: a sample is scheduled, and a group admitted, if there are
enough of each.

A group may keep the pages of its finished samples so that they can be branched. The branches of a sample form
a group of their own: the sample's tokens before the pivot, except the last, count as this group's prompt and
are in pages already. The first decode step of a branch computes the last one.
"""

import collections
import math

from qerl.engine.schedule.kept_pages import KeptPages
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.engine.schedule.page_pool import PagePool
from qerl.engine.schedule.window_pages import Held, WindowPages

_AHEAD_TOKENS = 2048  # the GPU waits for the launches of a prefill of fewer than 1,024
_JOINING_SHARE = 32  # of the rows, one in so many: the batch is rebuilt for that many samples, not for each


def num_pages(num_positions: int, page_tokens: int) -> int:
    return -(-num_positions // page_tokens)


def own_pages(prompt_tokens: int, max_tokens: int, page_tokens: int) -> int:
    """Return the most pages of a sample besides its group's shared ones. Its last token is never cached."""
    return num_pages(prompt_tokens + max_tokens - 1, page_tokens) - prompt_tokens // page_tokens


def min_group_pages(prompt_tokens: int, max_tokens: int, page_tokens: int) -> int:
    """Return the pages of a prompt and one of its samples: with fewer in all, the group can never run."""
    return num_pages(prompt_tokens, page_tokens) + own_pages(prompt_tokens, max_tokens, page_tokens)


class Scheduler:
    """Call in a loop: allocate, schedule, admit, sample first tokens, schedule, decode, finish.

    One decode may be several steps: `steps_without_preemption` returns how many fit into the free pages, and
    `allocate` with that number allocates them. Only `allocate` for one step preempts."""

    def __init__(
        self,
        groups: list[LiveGroup],
        pages: PagePool,
        *,
        page_tokens: int,
        max_num_seqs: int,
        max_admitted_tokens: int | None = None,
        states: PagePool | None = None,
        windows: WindowPages | None = None,
        kept: KeptPages | None = None,
    ):
        """max_admitted_tokens: prompt tokens after which `admit` takes no further group. states: slots of
        recurrent states, if layers have any. windows: pages of layers with a window, if they have their own.
        kept: keeps pages between the requests of an episode."""
        self.pages, self.kept = pages, kept
        self.windows = WindowPages(0, None) if windows is None else windows
        self.states = PagePool(0) if states is None else states
        self._num_states = 0 if states is None else 1  # of a prompt, of a sample
        self.running: list[LiveSample] = []  # oldest first
        self.parked: list[LiveSample] = []
        self.num_preemptions = 0
        self.has_postponed = False
        """True if the latest `admit` left a group to the next, so that running samples wait no longer."""
        self._page_tokens, self._max_num_seqs = page_tokens, max_num_seqs
        self._max_admitted_tokens = max_admitted_tokens or math.inf
        self._not_admitted = collections.deque(groups)
        self._waiting: collections.deque[LiveSample] = collections.deque()  # oldest first
        self._admitted: list[LiveGroup] = []
        self._finished_pages: dict[LiveSample, tuple[list[int], Held]] = {}
        self._finished_states: list[int] = []

    @property
    def is_done(self) -> bool:
        return not (self.running or self.parked or self.has_waiting)

    @property
    def has_waiting(self) -> bool:
        """True if a sample that is neither running nor parked remains."""
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
        """Return the largest of num_steps, num_steps / 2, ..., 1, 0 for which allocate(num_launched + it)
        preempts no sample."""
        self._give_back()
        while num_steps > 0:
            steps = num_launched + num_steps
            num_missing = sum(self._num_missing(s, steps) for s in self.running)
            num_windowed = sum(len(self._missing_windowed(s, steps)) for s in self.running)
            if self._has_free(num_missing, num_windowed) or self._could_reclaim(num_missing, num_windowed):
                return num_steps
            num_steps //= 2
        return 0

    def allocate(self, num_steps: int = 1) -> list[LiveSample]:
        """Allocate pages for the newest token of every running sample and num_steps - 1 more, oldest first.

        Return the samples that got a page. If there are too few pages, the youngest samples are preempted.
        """
        extended = []
        self._give_back()
        for sample in list(self.running):
            num_missing = self._num_missing(sample, num_steps)
            windowed = self._missing_windowed(sample, num_steps)
            if not sample.is_running or not (num_missing or windowed):
                continue
            while not self._reclaim(num_missing, len(windowed)) and sample.is_running:
                self._preempt(self.running[-1])
            if not sample.is_running:
                break  # it was the youngest itself; those after it are preempted already
            sample.pages += self.pages.allocate(num_missing)
            sample.window_pages |= self.windows.allocate(windowed)
            extended.append(sample)
        return extended

    def admit(self) -> list[LiveGroup]:
        """Return the groups whose prompts are to be prefilled now, with pages; their samples then wait."""
        admitted, num_tokens, self.has_postponed = [], 0, False
        num_live, num_reserved, num_new = len(self.running), self._num_reserved(), 0
        num_windowed = num_reserved
        most, ahead = self._max_num_seqs, 0 if self._num_states else self._max_num_seqs // 4
        while not self._waiting and self._not_admitted:
            if num_live >= most + ahead * (0 < num_tokens < _AHEAD_TOKENS):
                break
            group = self._not_admitted[0]
            self.has_postponed = num_tokens >= self._max_admitted_tokens
            if self.has_postponed or not self._fits(group, num_reserved, num_windowed, num_new):
                break
            num_tokens += group.prompt_tokens
            self._not_admitted.popleft()
            P = group.prompt_tokens
            group.pages = self._reuse(group)
            group.pages += self.pages.allocate(self._pages_of(P) - len(group.pages))
            group.window_pages = self.windows.allocate(self.windows.missing({}, P, P))
            group.state = self.states.allocate(self._num_states)
            group.num_unfinished = sum(s.finish is None for s in group.samples_G)
            num_live += group.num_unfinished
            num_new += group.num_unfinished
            num_reserved += group.num_unfinished * self._start_pages(group)
            num_windowed += group.num_unfinished * self._start_windowed(group)
            self._admitted.append(group)
            admitted.append(group)
        self._waiting.extend(s for group in admitted for s in group.samples_G if s.finish is None)
        return admitted

    def schedule(self) -> list[LiveSample]:
        """Move waiting samples to the running batch, oldest first, with pages up to their newest token.

        One page stays free for every running sample that may need another; otherwise the scheduled samples
        would be preempted as soon as their pages are computed.
        """
        scheduled = []
        num_reserved = self._num_reserved()
        while self._waiting and len(self.running) + len(scheduled) < self._max_num_seqs:
            sample = self._waiting[0]
            num_full = sample.group.prompt_tokens // self._page_tokens
            shared = sample.group.pages[:num_full]
            held = sample.window_pages if sample.pages else sample.group.window_pages
            windowed = [
                i
                for i in self.windows.missing({}, sample.first_query, sample.num_positions)
                if i not in held or (not sample.pages and i >= num_full)
            ]
            num_needed = self._pages_of(sample.num_positions)
            num_new = max(num_needed - len(sample.pages or shared), 0)
            num_reserved += num_needed < self._max_pages(sample.group)
            num_states = 0 if sample.state else self._num_states
            num_free = num_new + num_reserved, len(windowed) + num_reserved * self._num_windows
            if not self._reclaim(*num_free, num_states, keep=sample):
                break
            self._waiting.popleft()
            sample.state += self.states.allocate(num_states)
            if not sample.pages:
                sample.window_pages = self.windows.share(held, sample.first_query, num_full)
            sample.window_pages |= self.windows.allocate(windowed)
            sample.pages = (sample.pages or self.pages.share(shared)) + self.pages.allocate(num_new)
            sample.is_running = True
            scheduled.append(sample)
        self.running += scheduled
        return scheduled

    def finish(self, samples: list[LiveSample]) -> None:
        """Remove samples in any state; the last of a group also releases the prompt's pages."""
        for sample in samples:
            self._keep(sample)
            if sample.is_running and sample.group.keeps_pages:
                held = sample.window_pages
                kept = self.windows.share(held, sample.first_query, max(held, default=0) + 1)
                self._finished_pages[sample] = self.pages.share(sample.pages), kept
            if not sample.is_running:
                (self.parked if sample in self.parked else self._waiting).remove(sample)
            self._release(sample)
            group = sample.group
            group.num_unfinished -= 1
            if group.num_unfinished == 0:
                self.pages.release(group.pages)
                self.windows.release(group.window_pages)
                if group.keeps_pages:
                    self._finished_states += group.state
                else:
                    self.states.release(group.state)
                    group.state = []
                group.pages = []
                self._admitted.remove(group)
        self.running = [s for s in self.running if s.is_running]

    def _keep(self, sample: LiveSample) -> None:
        """Keep the pages of an ended sample for its episode; its newest token is not in them."""
        group = sample.group
        if self.kept is not None and group.episode is not None and sample.finish is not None:
            tokens_T = group.prompt.tokens_T + (sample.tokens_T[:-1] if sample.pages else [])
            self.kept.keep(group.episode, tokens_T, sample.pages or group.pages)

    def _reuse(self, group: LiveGroup) -> list[int]:
        """Return kept pages that hold its prompt's first tokens, unless something asks for their states."""
        if self.kept is None or group.episode is None or group.on_prompt_hidden is not None:
            return []
        pages = self.kept.reuse(group.episode, group.prompt.tokens_T)
        group.num_reused = len(pages) * self._page_tokens
        return pages

    def park(self, samples: list[LiveSample]) -> None:
        """Park running or waiting samples whose turns have ended; a running one has all tokens but the newest
        cached, unless its recurrent states hold later tokens too."""
        for sample in samples:
            if sample.is_running and sample.state and sample.has_overrun:
                self._release(sample)
                sample.has_overrun = False
            elif sample.is_running:
                sample.is_running, sample.num_cached = False, sample.num_positions - 1
                self.windows.cut(sample.window_pages, sample.num_cached)
            else:
                self._waiting.remove(sample)
        self.parked += samples
        self.running = [s for s in self.running if s.is_running]

    def resume(self, samples: list[LiveSample]) -> None:
        """Move parked samples, which have got the environment's tokens, to the waiting queue."""
        assert not self.running
        resumed = {id(s) for s in samples}
        self.parked = [s for s in self.parked if id(s) not in resumed]
        self._waiting = collections.deque(sorted([*self._waiting, *samples], key=lambda s: s.age))

    def branch(self, groups: list[LiveGroup]) -> None:
        """Admit branches of finished samples on their pages; release all other pages of finished samples."""
        for group in groups:
            assert group.parent is not None and group.num_parent_tokens < len(group.parent.tokens_T)
            pages, held = self._finished_pages[group.parent]
            group.state = self.states.share(group.parent.group.state)
            num_shared = self._pages_of(group.prompt_tokens)
            group.pages = self.pages.share(pages[:num_shared])
            group.window_pages = self.windows.share(held, group.prompt_tokens, num_shared)
            group.num_unfinished = len(group.samples_G)
            self._admitted.append(group)
            self._waiting.extend(group.samples_G)
        for pages, held in self._finished_pages.values():
            self.pages.release(pages)
            self.windows.release(held)
        self.states.release(self._finished_states)
        self._finished_pages.clear()
        self._finished_states.clear()

    def _give_back(self) -> None:
        """Release the pages that are wholly before the windows of the running samples."""
        for sample in self.running:
            self.windows.give_back(sample.window_pages, sample.first_query)

    def _reclaim(
        self, num: int, num_windowed: int, num_states: int = 0, keep: LiveSample | None = None
    ) -> bool:
        """Release what samples between turns hold, youngest first, until `num` pages, num_windowed of layers
        with a window and num_states slots are free; True if they are. The sample `keep` keeps its pages."""
        if not self._has_free(num, num_windowed, num_states):
            for sample in sorted(self._between_turns(), key=lambda s: s.age, reverse=True):
                if sample is not keep and not self._has_free(num, num_windowed, num_states):
                    self._release(sample)
        return self._has_free(num, num_windowed, num_states)

    def _has_free(self, num: int, num_windowed: int, num_states: int = 0) -> bool:
        has_windowed = self.windows.pool.num_free >= num_windowed
        return self.pages.num_free >= num and has_windowed and self.states.num_free >= num_states

    def _could_reclaim(self, num: int, num_windowed: int) -> bool:
        """True if `_reclaim` could free so many pages; a prompt's pages stay with its group."""
        holders = [s for s in self._between_turns() if s.pages]
        pages = sum(len(s.pages) - s.group.prompt_tokens // self._page_tokens for s in holders)
        windowed = sum(
            len(s.window_pages) - len(set(s.window_pages.values()) & set(s.group.window_pages.values()))
            for s in holders
        )
        return self.pages.num_free + pages >= num and self.windows.pool.num_free + windowed >= num_windowed

    def _between_turns(self) -> list[LiveSample]:
        return [*self._waiting, *self.parked]

    def _fits(self, group: LiveGroup, num_reserved: int, num_windowed: int, num_new_states: int) -> bool:
        """True if its prompt and a first sample fit next to the reserved pages and slots, and any one
        admitted sample can reach its maximum length."""
        groups, windows = [*self._admitted, group], self.windows
        prompt_pages = sum(self._pages_of(g.prompt_tokens) for g in groups)
        largest = max(own_pages(g.prompt_tokens, g.max_tokens, self._page_tokens) for g in groups)
        now = self._pages_of(group.prompt_tokens) + self._start_pages(group)
        if prompt_pages + largest > self.pages.num_pages or now + num_reserved > self.pages.num_free:
            return False
        prompt_pages = sum(windows.prompt_pages(g.prompt_tokens) for g in groups)
        now = windows.prompt_pages(group.prompt_tokens) + self._start_windowed(group)
        if prompt_pages + windows.sample_pages(largest) > windows.pool.num_pages:
            return False
        if now + num_windowed * self._num_windows > windows.pool.num_free:
            return False
        return not self._num_states or self.states.num_free >= num_new_states + 2

    @property
    def _num_windows(self) -> int:
        """Pages of layers with a window that a sample needs beside each of its others."""
        return 0 if self.windows.window is None else 1

    def _start_windowed(self, group: LiveGroup) -> int:
        return self.windows.sample_pages(self._start_pages(group))

    def _start_pages(self, group: LiveGroup) -> int:
        """Pages that a sample needs to be scheduled with one token and leave one in reserve."""
        most = own_pages(group.prompt_tokens, group.max_tokens, self._page_tokens)
        return min(own_pages(group.prompt_tokens, 2, self._page_tokens) + 1, most)

    def _num_reserved(self) -> int:
        """Number of running samples that may need one more page."""
        return sum(len(s.pages) < self._max_pages(s.group) for s in self.running)

    def _num_missing(self, sample: LiveSample, num_steps: int) -> int:
        """Pages missing for its newest token and num_steps - 1 more, up to its maximum length."""
        needed = self._pages_of(sample.num_positions + num_steps - 1)
        return max(min(needed, self._max_pages(sample.group)) - len(sample.pages), 0)

    def _missing_windowed(self, sample: LiveSample, num_steps: int) -> list[int]:
        """Return the places of the pages of layers with a window that it lacks for the same tokens."""
        last = sample.group.prompt_tokens + sample.group.max_tokens - 1
        num_positions = min(sample.num_positions + num_steps - 1, last)
        return self.windows.missing(sample.window_pages, sample.first_query, num_positions)

    def _max_pages(self, group: LiveGroup) -> int:
        """Pages of one of its samples at maximum length, shared pages included."""
        return self._pages_of(group.prompt_tokens + group.max_tokens - 1)

    def _pages_of(self, num_positions: int) -> int:
        return num_pages(num_positions, self._page_tokens)

    def _preempt(self, sample: LiveSample) -> None:
        self.running.remove(sample)
        self._release(sample)
        self._waiting.appendleft(sample)
        self.num_preemptions += 1

    def _release(self, sample: LiveSample) -> None:
        self.pages.release(sample.pages)
        self.windows.release(sample.window_pages)
        self.states.release(sample.state)
        sample.pages, sample.state, sample.is_running, sample.num_cached = [], [], False, 0
