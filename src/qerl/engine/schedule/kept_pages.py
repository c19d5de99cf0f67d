"""Keep the pages of answered requests for the next request of the same episode, within a budget.

    keep       the full pages of a prompt and its answer, which then need no owner
    reuse      add an owner to those of the longest prefix that a new prompt of the episode has with them

A kept page without an owner counts as free (page_pool.py): it is given up as soon as someone allocates it,
the least recently used sequence first. So whom the scheduler admits, runs or preempts does not depend on
what is kept. Full pages are never written again, and sharing them shares a mixture's routes too. A prompt's
last token is always computed, because the first token is sampled from it.
"""

import dataclasses

from qerl.engine.schedule.page_pool import PagePool


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    episode: object
    tokens_T: list[int]
    """Those in the pages."""
    pages: list[int]


class KeptPages:
    def __init__(self, pool: PagePool, max_pages: int, page_tokens: int):
        """max_pages: of all kept sequences together; pages that several share count for each."""
        self._pool, self._max_pages, self._page_tokens = pool, max_pages, page_tokens
        self._kept: list[_Kept] = []  # least recently used first
        pool.give_up = self._drop_oldest

    def keep(self, episode: object, tokens_T: list[int], pages: list[int]) -> None:
        """Keep the first of these pages, which hold the tokens; only full ones. A sequence of the episode
        that they begin with is no longer kept by itself."""
        num = min(len(tokens_T) // self._page_tokens, self._max_pages)
        new = _Kept(episode, tokens_T[: num * self._page_tokens], pages[:num])
        if not num:
            return
        self._pool.keep(new.pages)
        for k in [k for k in self._kept if k.episode is episode]:
            if new.tokens_T[: len(k.tokens_T)] == k.tokens_T:
                self._drop(k)
        while sum(len(k.pages) for k in self._kept) + num > self._max_pages:
            self._drop_oldest()
        self._kept.append(new)

    def reuse(self, episode: object, prompt_T: list[int]) -> list[int]:
        """Return pages that hold the prompt's first tokens, with one more owner."""
        shared = [(self._common(kept, prompt_T), kept) for kept in self._kept if kept.episode is episode]
        pages, longest = max(shared, key=lambda pair: len(pair[0]), default=([], None))
        if longest is not None and pages:
            self._kept.remove(longest)
            self._kept.append(longest)
        return self._pool.share(pages)

    def forget(self, episodes: list[object]) -> None:
        """Drop all that is kept for these episodes."""
        for kept in [k for k in self._kept if k.episode in episodes]:
            self._drop(kept)

    def _common(self, kept: _Kept, prompt_T: list[int]) -> list[int]:
        size, num = self._page_tokens, 0
        num_full = min(len(kept.pages), (len(prompt_T) - 1) // size)
        while num < num_full and kept.tokens_T[num * size :][:size] == prompt_T[num * size :][:size]:
            num += 1
        return kept.pages[:num]

    def _drop_oldest(self) -> None:
        self._drop(self._kept[0])

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._pool.drop(kept.pages)
