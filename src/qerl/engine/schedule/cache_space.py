"""The space of a KV cache: how much of it is free, and what prompts and samples hold of it.

    pages      keys and values, of all layers or of those without a window (page_pool.py); pages kept between
               requests count as free (kept_pages.py)
    windowed   pages of layers with a window, if they have their own: a sample holds those that its later
               queries see (window_pages.py)
    slots      recurrent states (kv_cache.py), if layers have any: one of a prompt, after its last token, and
               one of each running or parked sample

The pages of a sample, in the order of its positions:

    the prompt's full pages, shared by reference | a copy of its partial page | pages for sampled tokens

A sample that has lost its pages and its slot starts from its prompt's again.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Protocol

from qerl.engine.schedule.kept_pages import KeptPages
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.engine.schedule.page_pool import PagePool, num_pages, own_pages
from qerl.engine.schedule.window_pages import Window, WindowPages


class HasPages(Protocol):
    @property
    def pages(self) -> list[int]: ...
    @property
    def window_pages(self) -> dict[int, int]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """An amount of each kind."""

    pages: int = 0
    windowed: int = 0
    slots: int = 0

    def __add__(self, other: "Space") -> "Space":
        return Space(self.pages + other.pages, self.windowed + other.windowed, self.slots + other.slots)

    def __mul__(self, factor: float) -> "Space":
        """Return the product, rounded up."""
        return Space(*(math.ceil(factor * n) for n in (self.pages, self.windowed, self.slots)))

    def __bool__(self) -> bool:
        return self.pages > 0 or self.windowed > 0 or self.slots > 0

    def __le__(self, other: "Space") -> bool:
        """True if no amount exceeds the other's."""
        has_pages = self.pages <= other.pages and self.windowed <= other.windowed
        return has_pages and self.slots <= other.slots

    def at_least(self, other: "Space") -> "Space":
        """Return the larger amount of each kind."""
        return Space(
            max(self.pages, other.pages), max(self.windowed, other.windowed), max(self.slots, other.slots)
        )


_NOTHING = Space()


class CacheSpace:
    def __init__(
        self, total: Space, page_tokens: int, *, window: Window | None = None, max_kept_pages: int = 0
    ):
        """window: None unless layers with a window have their own pages. max_kept_pages: for keeping pages
        between the requests of an episode."""
        self.total, self.page_tokens = total, page_tokens
        self.pages, self.slots = PagePool(total.pages), PagePool(total.slots)
        self.windows = WindowPages(total.windowed, window)
        self.kept_pages = KeptPages(self.pages, max_kept_pages, page_tokens)
        self._windowed_each, self._slots_each = int(window is not None), min(total.slots, 1)

    @property
    def free(self) -> Space:
        return Space(self.pages.num_free, self.windows.pool.num_free, self.slots.num_free)

    def has_free(self, needed: Space) -> bool:
        has_pages = needed.pages <= self.pages.num_free and needed.windowed <= self.windows.pool.num_free
        return has_pages and needed.slots <= self.slots.num_free

    def can_finish(self, prompts: Space, longest: int) -> bool:
        """True if next to these prompts there is space for a sample with `longest` pages of its own."""
        return prompts + self._sample(longest) <= self.total

    def prompts(self, groups: list[LiveGroup]) -> tuple[Space, int]:
        """Return the space of these groups' prompts, and the most pages that one of their samples has."""
        return sum(map(self.prompt, groups), Space()), max(map(self.own_pages, groups), default=0)

    def own_pages(self, group: LiveGroup) -> int:
        """Return the pages of one of its samples at its maximum length, besides the prompt's full ones."""
        return own_pages(group.prompt_tokens, group.max_tokens, self.page_tokens)

    def prompt(self, group: LiveGroup) -> Space:
        """Return the space of the group's prompt. A branch uses the slot of its parent's prompt."""
        pages = num_pages(group.prompt_tokens, self.page_tokens)
        slots = 0 if group.parent is not None else self._slots_each
        return Space(pages, self.windows.prompt_pages(group.prompt_tokens), slots)

    def first_sample(self, group: LiveGroup) -> Space:
        """Return what one of its samples needs to run with one token and leave a page in reserve."""
        longest = own_pages(group.prompt_tokens, group.max_tokens, self.page_tokens)
        return self._sample(min(own_pages(group.prompt_tokens, 2, self.page_tokens) + 1, longest))

    def missing(self, samples: Iterable[LiveSample], num_steps: int = 1) -> Space:
        """Return the space to allocate for these samples' newest tokens and num_steps - 1 more, up to their
        maximum lengths, besides what they share with their prompts."""
        pages, windowed, slots = 0, 0, 0
        for sample in samples:
            num, places = self._missing_pages(sample, num_steps)
            pages, windowed = pages + num, windowed + len(places)
            slots += 0 if sample.state else self._slots_each
        return Space(pages, windowed, slots) if pages or windowed or slots else _NOTHING

    def growth(self, samples: Iterable[LiveSample]) -> Space:
        """Return a page of each kind for each sample that may outgrow its pages, or those it starts with."""
        num = 0
        for s in samples:
            has = len(s.pages) if s.is_running else num_pages(s.num_positions, self.page_tokens)
            num += has < num_pages(s.group.prompt_tokens + s.group.max_tokens - 1, self.page_tokens)
        return Space(num, num * self._windowed_each)

    def releasable(self, samples: Iterable[LiveSample]) -> Space:
        """Return the pages that releasing these samples frees; the prompts' pages stay with their groups."""
        pages, windowed = 0, 0
        for sample in samples:
            if sample.pages:
                prompts = set(sample.group.window_pages.values())
                pages += len(sample.pages) - self._num_full(sample.group)
                windowed += len(sample.window_pages) - len(prompts.intersection(sample.window_pages.values()))
        return Space(pages, windowed)

    def allocate_prompt(self, group: LiveGroup) -> None:
        """Allocate a prompt's space. Kept pages of the same tokens come first, unless the hidden states of
        these tokens are requested."""
        if group.episode is not None and group.on_prompt_hidden is None:
            group.pages = self.kept_pages.reuse(group.episode, group.prompt.tokens_T)
            group.num_reused = len(group.pages) * self.page_tokens
        P = group.prompt_tokens
        group.pages += self.pages.allocate(num_pages(P, self.page_tokens) - len(group.pages))
        group.window_pages = self.windows.allocate(self.windows.missing({}, P, P))
        group.state = self.slots.allocate(self._slots_each)

    def share_prompt(self, group: LiveGroup) -> None:
        """Share with a branch's group the prompt pages that its finished parent still holds."""
        parent, P = group.parent, group.prompt_tokens
        assert parent is not None and parent.pages
        num_shared = num_pages(P, self.page_tokens)
        group.pages = self.pages.share(parent.pages[:num_shared])
        group.window_pages = self.windows.share(parent.window_pages, P, num_shared)
        group.state = self.slots.share(parent.group.state)

    def allocate(self, sample: LiveSample, num_steps: int = 1) -> None:
        """Allocate what `missing` counts for this sample."""
        num, places = self._missing_pages(sample, num_steps)
        if not sample.pages:
            group, num_full = sample.group, self._num_full(sample.group)
            sample.pages = self.pages.share(group.pages[:num_full])
            sample.window_pages = self.windows.share(group.window_pages, sample.first_query, num_full)
        sample.pages += self.pages.allocate(num)
        if places:
            sample.window_pages |= self.windows.allocate(places)
        if not sample.state:
            sample.state = self.slots.allocate(self._slots_each)

    def leave_windows(self, samples: Iterable[LiveSample]) -> None:
        """Release the pages that are wholly before the windows of these samples."""
        if self._windowed_each:
            for sample in samples:
                self.windows.give_back(sample.window_pages, sample.first_query)

    def cut(self, sample: LiveSample) -> None:
        """Release the window pages that lie wholly behind the sample's cached positions."""
        self.windows.cut(sample.window_pages, sample.num_cached)

    def keep(self, sample: LiveSample) -> None:
        """Keep the pages of an ended sample for its episode; its newest token is not in them."""
        group = sample.group
        if group.episode is not None and sample.finish is not None:
            tokens_T = group.prompt.tokens_T + (sample.tokens_T[:-1] if sample.pages else [])
            self.kept_pages.keep(group.episode, tokens_T, sample.pages or group.pages)

    def release(self, holder: LiveGroup | LiveSample) -> None:
        self.release_pages(holder)
        self.release_slot(holder)

    def release_pages(self, holder: LiveGroup | LiveSample) -> None:
        self.pages.release(holder.pages)
        self.windows.release(holder.window_pages)
        holder.pages = []

    def release_slot(self, holder: LiveGroup | LiveSample) -> None:
        self.slots.release(holder.state)
        holder.state = []

    def _sample(self, num_own: int) -> Space:
        """Return the space of a sample with num_own pages besides its prompt's."""
        return Space(num_own, self.windows.sample_pages(num_own), self._slots_each)

    def _missing_pages(self, sample: LiveSample, num_steps: int) -> tuple[int, list[int]]:
        """Return the number of missing pages, and the places of missing window pages."""
        group, windowed = sample.group, sample.window_pages
        num = len(sample.pages)
        if not num:
            num = self._num_full(group)
            windowed = {i: page for i, page in group.window_pages.items() if i < num}
        longest = group.prompt_tokens + group.max_tokens - 1
        num_positions = min(sample.num_positions + num_steps - 1, longest)
        places = []
        if self._windowed_each:
            places = self.windows.missing(windowed, sample.first_query, num_positions)
        return max(num_pages(num_positions, self.page_tokens) - num, 0), places

    def _num_full(self, group: LiveGroup) -> int:
        """Return the number of its prompt's full pages."""
        return group.prompt_tokens // self.page_tokens
