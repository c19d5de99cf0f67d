"""Decides which samples run, and who gets pages when there are too few. No tensors.

Samples queue in one order for good: prompt by prompt, sample by sample. A group is admitted when nobody older
waits: its prompt is computed and the first token of all its samples drawn. They then wait, enter the running
batch oldest first, and leave it when they finish. A sample without a page for its newest token takes those of
the youngest running sample, which is paused: it keeps its tokens, waits at the head of the queue, and enters
again with its own pages computed anew. A sample whose turn in a conversation has ended rests with its pages
until all who can run have got so far; when they go on, or when there are too few pages, the youngest of those
who rest lose theirs first. Two things follow. Every running sample is older than every waiting
one, so none starves. And the oldest always gets on, because a group is admitted only if the prompts of all
admitted groups leave room for the largest sample among them.

A sample's pages, in the order of its positions:

    the prompt's full pages, shared by reference | a copy of its partial page | pages for what was sampled

A group may keep the pages of its finished samples. Branches of one are then a group of their own: what they
have of the sample, but for the last token, is this group's prompt and lies in pages already. The last token
is as if a branch had just drawn it: the branch's first decode step computes it.
"""

import collections
import dataclasses
from typing import Literal

from qerl.engine.page_pool import PagePool


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class LiveGroup:
    """A prompt whose samples are not all finished."""

    index: int
    """Its place among the prompts of this call."""
    prompt_tokens: int
    max_tokens: int
    """Longest sample that it may have."""
    samples_G: list["LiveSample"] = dataclasses.field(default_factory=list)
    num_unfinished: int = 0
    noise_row: int = 0
    """Of the prompt's tokens, in the norms' table of noise."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """Of the prompt; held from its admission until the last of its samples finishes."""
    keeps_pages: bool = False
    """Whether its finished samples keep theirs, to be branched."""
    parent: "LiveSample | None" = None
    """The sample that this group's samples are branches of; prompt_tokens then counts tokens of it too."""

    def __post_init__(self):
        assert self.prompt_tokens > 0 and self.max_tokens > 0

    @property
    def path(self) -> tuple[int, ...]:
        """What names its samples' randomness together with the prompt's index and their own."""
        return () if self.parent is None else (self.parent.sample_index,)

    @property
    def prefix(self) -> slice:
        """The parent's tokens that count as prompt."""
        return slice(0 if self.parent is None else self.prompt_tokens - self.parent.group.prompt_tokens)


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class LiveSample:
    group: LiveGroup
    sample_index: int
    noise_row: int = 0
    """In the norms' table of noise."""
    tokens_T: list[int] = dataclasses.field(default_factory=list)
    logprobs_T: list[float] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    """Empty unless it runs, or rests between two turns."""
    is_running: bool = False
    environment_spans: list[range] = dataclasses.field(default_factory=list)
    """Where in tokens_T an environment's tokens lie."""
    num_cached: int = 0
    """Positions in the pages that it rests with."""
    max_tokens: int = dataclasses.field(init=False)
    """So many tokens end its turn, at the latest."""
    finish: Literal["stop", "length"] | None = None

    def __post_init__(self):
        self.max_tokens = self.group.max_tokens

    @property
    def turn_T(self) -> list[int]:
        """What was sampled since it was last given tokens, if it was given any."""
        return self.tokens_T[self.environment_spans[-1].stop :] if self.environment_spans else self.whole_T

    @property
    def num_positions(self) -> int:
        """Of prompt and sample: what the cache holds once the newest token has been computed."""
        return self.group.prompt_tokens + len(self.tokens_T)

    @property
    def whole_T(self) -> list[int]:
        """The tokens of the sample, with those that a branch has from its parent."""
        parent = self.group.parent
        return self.tokens_T if parent is None else parent.tokens_T[self.group.prefix] + self.tokens_T

    @property
    def whole_logprobs_T(self) -> list[float]:
        parent = self.group.parent
        return self.logprobs_T if parent is None else parent.logprobs_T[self.group.prefix] + self.logprobs_T


def _age(sample: LiveSample) -> tuple[int, int]:
    return sample.group.index, sample.sample_index


def num_pages(num_positions: int, page_tokens: int) -> int:
    return -(-num_positions // page_tokens)


def own_pages(prompt_tokens: int, max_tokens: int, page_tokens: int) -> int:
    """The most pages a sample holds beside those shared with its group; its last token is never computed."""
    return num_pages(prompt_tokens + max_tokens - 1, page_tokens) - prompt_tokens // page_tokens


def group_pages(prompt_tokens: int, max_tokens: int, page_tokens: int) -> int:
    """What a prompt and one of its samples hold together at most: less than this, and it can never run."""
    return num_pages(prompt_tokens, page_tokens) + own_pages(prompt_tokens, max_tokens, page_tokens)


def kept_pages(group: LiveGroup, page_tokens: int) -> int:
    """What a group that keeps its samples' pages holds at most, and beside it one branch at its longest."""
    own = own_pages(group.prompt_tokens, group.max_tokens, page_tokens)
    return num_pages(group.prompt_tokens, page_tokens) + (len(group.samples_G) + 1) * own


class Scheduler:
    """Drive it in a circle: grow, enter, admit, draw first tokens, enter, decode; finish whoever is done.

    A decode may be of several steps at once: `room` says how many fit into the pages there are, and `allocate`
    with so many gives them out. Nobody is paused then; only growing by one step pauses.
    """

    def __init__(self, groups: list[LiveGroup], pages: PagePool, *, page_tokens: int, max_running: int):
        self.pages = pages
        self.running: list[LiveSample] = []  # oldest first
        self.resting: list[LiveSample] = []
        self.num_pauses = 0
        self._page_tokens = page_tokens
        self._max_running = max_running
        self._not_admitted = collections.deque(groups)
        self._waiting: collections.deque[LiveSample] = collections.deque()  # oldest first
        self._admitted: list[LiveGroup] = []
        self._kept: dict[LiveSample, list[int]] = {}

    @property
    def is_done(self) -> bool:
        return not (self.running or self._waiting or self._not_admitted or self.resting)

    @property
    def has_others(self) -> bool:
        """Whether some sample that is not running may yet run."""
        return bool(self._waiting or self._not_admitted)

    def room(self, num_steps: int, num_ahead: int = 0) -> int:
        """The largest of num_steps, num_steps / 2, ..., 1, 0 for which grow(num_ahead + it) pauses nobody."""
        while num_steps > 0:
            num_lacking = sum(self._lacking(s, num_ahead + num_steps) for s in self.running)
            if num_lacking <= self.pages.num_free or num_lacking <= self.pages.num_free + self._num_held():
                return num_steps
            num_steps //= 2
        return 0

    def allocate(self, num_steps: int = 1) -> list[LiveSample]:
        """Gives every running sample room for its newest token and the num_steps - 1 to come, oldest first;
        those that got a page. The youngest are paused if there are too few."""
        grown = []
        for sample in [s for s in self.running if self._lacking(s, num_steps)]:
            num_lacking = self._lacking(sample, num_steps)
            while not self._reclaim(num_lacking) and sample.is_running:
                self._pause(self.running[-1])
            if not sample.is_running:
                break  # it was the youngest itself; those after it are paused already
            sample.pages += self.pages.take(num_lacking)
            grown.append(sample)
        return grown

    def admit(self) -> list[LiveGroup]:
        """The groups whose prompts are to be computed now, with pages for them; their samples then wait."""
        admitted = []
        num_live, promised = len(self.running), self._reserve()
        while not self._waiting and self._not_admitted and num_live < self._max_running:
            group = self._not_admitted[0]
            if not self._has_room(group, promised):
                break
            self._not_admitted.popleft()
            group.pages = self.pages.take(num_pages(group.prompt_tokens, self._page_tokens))
            group.num_unfinished = len(group.samples_G)
            num_live += len(group.samples_G)
            promised += len(group.samples_G) * self._first_pages(group)
            self._admitted.append(group)
            admitted.append(group)
        self._waiting.extend(s for group in admitted for s in group.samples_G)
        return admitted

    def schedule(self) -> list[LiveSample]:
        """Waiting samples that join the running batch, oldest first, with pages up to their newest token.

        One page stays free for every running sample that may need another, or the newcomers would be paused
        as soon as their pages are computed.
        """
        scheduled = []
        reserve = self._reserve()
        while self._waiting and len(self.running) + len(scheduled) < self._max_running:
            sample = self._waiting[0]
            shared = sample.group.pages[: sample.group.prompt_tokens // self._page_tokens]
            num_reached = num_pages(sample.num_positions, self._page_tokens)
            num_new = max(num_reached - len(sample.pages or shared), 0)
            reserve += num_reached < self._most_pages(sample.group)
            if not self._reclaim(num_new + reserve, sample):
                break
            self._waiting.popleft()
            sample.pages = (sample.pages or self.pages.share(shared)) + self.pages.take(num_new)
            sample.is_running = True
            scheduled.append(sample)
        self.running += scheduled
        return scheduled

    def finish(self, samples: list[LiveSample]) -> None:
        """Lets samples go, whatever they do; the last of a group takes the prompt's pages along."""
        for sample in samples:
            if sample.is_running and sample.group.keeps_pages:
                self._kept[sample] = self.pages.share(sample.pages)
            if not sample.is_running:
                (self.resting if sample in self.resting else self._waiting).remove(sample)
            self._leave(sample)
            group = sample.group
            group.num_unfinished -= 1
            if group.num_unfinished == 0:
                self.pages.release(group.pages)
                group.pages = []
                self._admitted.remove(group)
        self.running = [s for s in self.running if s.is_running]

    def park(self, samples: list[LiveSample]) -> None:
        """Their turns have ended, running or waiting; all tokens but the newest are cached, if they ran."""
        for sample in samples:
            if sample.is_running:
                sample.is_running, sample.num_cached = False, sample.num_positions - 1
            else:
                self._waiting.remove(sample)
        self.resting += samples
        self.running = [s for s in self.running if s.is_running]

    def resume(self, samples: list[LiveSample]) -> None:
        """These go on, with the tokens that they were given. Nobody runs."""
        assert not self.running
        woken = {id(s) for s in samples}
        self.resting = [s for s in self.resting if id(s) not in woken]
        self._waiting = collections.deque(sorted([*self._waiting, *samples], key=_age))

    def _reclaim(self, num: int, keeper: LiveSample | None = None) -> bool:
        """Whether so many pages are free, once those of samples between turns are taken, the youngest first,
        as far as need be; not the keeper's."""
        if self.pages.num_free < num:
            for sample in sorted([*self._waiting, *self.resting], key=_age, reverse=True):
                if sample is not keeper and self.pages.num_free < num:
                    self._leave(sample)
        return self.pages.num_free >= num

    def _num_held(self) -> int:
        """What `_reclaim` could take; a prompt's pages stay its group's."""
        holders = [s for s in (*self._waiting, *self.resting) if s.pages]
        return sum(len(s.pages) - s.group.prompt_tokens // self._page_tokens for s in holders)

    def branch(self, groups: list[LiveGroup]) -> None:
        """Admits branches of finished samples, on the pages kept of these; what else was kept is let go."""
        for group in groups:
            assert group.parent is not None and group.prefix.stop < len(group.parent.tokens_T)
            kept = self._kept[group.parent]
            group.pages = self.pages.share(kept[: num_pages(group.prompt_tokens, self._page_tokens)])
            group.num_unfinished = len(group.samples_G)
            self._admitted.append(group)
            self._waiting.extend(group.samples_G)
        for pages in self._kept.values():
            self.pages.release(pages)
        self._kept.clear()

    def _has_room(self, group: LiveGroup, promised: int) -> bool:
        """Whether its prompt and a first sample fit beside what is promised to samples before it, and any one
        admitted sample can get to its end."""
        groups = [*self._admitted, group]
        held = sum(num_pages(g.prompt_tokens, self._page_tokens) for g in groups)
        largest = max(own_pages(g.prompt_tokens, g.max_tokens, self._page_tokens) for g in groups)
        now = num_pages(group.prompt_tokens, self._page_tokens) + self._first_pages(group)
        return held + largest <= self.pages.num_pages and now + promised <= self.pages.num_free

    def _first_pages(self, group: LiveGroup) -> int:
        """What a sample needs to enter with one token and leave its reserve."""
        most = own_pages(group.prompt_tokens, group.max_tokens, self._page_tokens)
        return min(own_pages(group.prompt_tokens, 2, self._page_tokens) + 1, most)

    def _reserve(self) -> int:
        """Running samples that may need a page more than they have."""
        return sum(len(s.pages) < self._most_pages(s.group) for s in self.running)

    def _lacking(self, sample: LiveSample, num_steps: int) -> int:
        """Pages it has too few for its newest token and num_steps - 1 more, as far as it may have them."""
        reach = num_pages(sample.num_positions + num_steps - 1, self._page_tokens)
        return max(min(reach, self._most_pages(sample.group)) - len(sample.pages), 0)

    def _most_pages(self, group: LiveGroup) -> int:
        """What one of its samples holds at its longest, shared pages included."""
        return num_pages(group.prompt_tokens + group.max_tokens - 1, self._page_tokens)

    def _pause(self, sample: LiveSample) -> None:
        self.running.remove(sample)
        self._leave(sample)
        self._waiting.appendleft(sample)
        self.num_pauses += 1

    def _leave(self, sample: LiveSample) -> None:
        self.pages.release(sample.pages)
        sample.pages, sample.is_running, sample.num_cached = [], False, 0
