"""Keep the pages of answered requests for the next request of the same episode, within a budget.

    keep       the full pages of a prompt and its answer, which then need no owner
    reuse      add an owner to those of the longest prefix that a new prompt of the episode has with them

A kept page without an owner counts as free (page_pool.py): an allocation that needs it evicts the least
recently used sequence. So the scheduler's decisions do not depend on what is kept. Full pages are never
written again, and sharing them shares a mixture's routes too. A prompt's last token is always computed,
because the first token is sampled from it.
"""

import dataclasses

from qerl.engine.schedule.page_pool import PagePool


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Sequence:
    """Tokens whose keys and values fill the pages."""

    episode: object
    tokens_T: list[int]
    pages: list[int]


class KeptPages:
    def __init__(self, pool: PagePool, max_pages: int, page_tokens: int):
        """max_pages: of all sequences together; pages that several share count for each."""
        self._pool, self._max_pages, self._page_tokens = pool, max_pages, page_tokens
        self._sequences: list[_Sequence] = []  # least recently used first
        pool.evict = self._drop_oldest

    def keep(self, episode: object, tokens_T: list[int], pages: list[int]) -> None:
        """Keep the full ones of these pages, which hold the tokens. The new sequence replaces those of the
        episode that it begins with."""
        num = min(len(tokens_T) // self._page_tokens, self._max_pages)
        if not num:
            return
        new = _Sequence(episode, tokens_T[: num * self._page_tokens], pages[:num])
        self._pool.keep(new.pages)
        for old in [each for each in self._sequences if each.episode is episode]:
            if new.tokens_T[: len(old.tokens_T)] == old.tokens_T:
                self._drop(old)
        while sum(len(each.pages) for each in self._sequences) + num > self._max_pages:
            self._drop_oldest()
        self._sequences.append(new)

    def reuse(self, episode: object, prompt_T: list[int]) -> list[int]:
        """Return pages that hold the prompt's first tokens, with one more owner."""
        shared = [(self._common(each, prompt_T), each) for each in self._sequences if each.episode is episode]
        pages, longest = max(shared, key=lambda pair: len(pair[0]), default=([], None))
        if longest is not None and pages:
            self._sequences.remove(longest)
            self._sequences.append(longest)
        return self._pool.share(pages)

    def forget(self, episodes: list[object]) -> None:
        """Drop all that is kept for these episodes."""
        for sequence in [each for each in self._sequences if each.episode in episodes]:
            self._drop(sequence)

    def _common(self, sequence: _Sequence, prompt_T: list[int]) -> list[int]:
        size, num = self._page_tokens, 0
        num_full = min(len(sequence.pages), (len(prompt_T) - 1) // size)
        while num < num_full and sequence.tokens_T[num * size :][:size] == prompt_T[num * size :][:size]:
            num += 1
        return sequence.pages[:num]

    def _drop_oldest(self) -> None:
        self._drop(self._sequences[0])

    def _drop(self, sequence: _Sequence) -> None:
        self._sequences.remove(sequence)
        self._pool.drop(sequence.pages)
