"""Pages of the layers with a window: a sequence holds those that its later queries see, and no others.

    page i of a sequence   its positions i * page_tokens to (i + 1) * page_tokens - 1
    a query at position p  sees the positions j with p - window < j <= p
    held                   {i: page}: from the first page that the sequence's newest token sees

Before its next pages are allocated, a running sample releases the pages wholly before that one. A group holds
the window of its prompt's end until its last sample finishes, so a preempted sample starts from there; keys
and values that it computes again and no later query sees go to the unused page (prefill.py). Groups that keep
their pages to be branched release none.
"""

import dataclasses

from qerl.engine.schedule.page_pool import PagePool
from qerl.models.architecture import Architecture

Held = dict[int, int]

_AHEAD = 32  # positions that are allocated before the host has read their tokens: at least two bursts


def windowed_layers(a: Architecture) -> tuple[int, ...]:
    """Return the indices of the layers whose attention has a window."""
    return tuple(i for i, kind in enumerate(a.kinds) if kind.mixer == "attention" and kind.window is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """The widest window of a decoder's layers, in positions, and the positions of a page."""

    size: int
    page_tokens: int

    @classmethod
    def of(cls, a: Architecture, page_tokens: int) -> "Window | None":
        """Return None if no layer has a window, or if others have recurrent states, which are computed again
        from keys and values before the window."""
        sizes = [a.kind(i).window or 0 for i in windowed_layers(a)]
        return cls(max(sizes), page_tokens) if sizes and a.delta is None else None

    @property
    def max_pages(self) -> int:
        """Maximum number of pages that `size` consecutive positions lie in."""
        return (self.size - 2) // self.page_tokens + 2

    def first_page(self, num_positions: int) -> int:
        """Return the first page that the newest of num_positions positions sees."""
        return max(num_positions - self.size, 0) // self.page_tokens

    def prompt_pages(self, prompt_tokens: int) -> int:
        """Return the pages of a prompt that the token after it sees."""
        return -(-prompt_tokens // self.page_tokens) - self.first_page(prompt_tokens + 1)

    def running_pages(self, own_pages: int) -> int:
        """Return the maximum pages of a running sample besides its prompt's, two bursts ahead included."""
        return min(own_pages, self.max_pages + -(-_AHEAD // self.page_tokens) + 1)

    def sample_pages(self, own_pages: int) -> int:
        """Return the maximum pages of a sample besides its prompt's, of own_pages without a window: those of
        its window, of its next turn's while that is computed, and one in reserve."""
        return min(own_pages, 2 * self.max_pages + 1)


class WindowPages:
    """The pool of these pages; without a window it is empty and no pages are needed."""

    def __init__(self, num_pages: int, window: Window | None):
        self.pool = PagePool(0 if window is None else num_pages)
        self.window = window

    def prompt_pages(self, prompt_tokens: int) -> int:
        return 0 if self.window is None else self.window.prompt_pages(prompt_tokens)

    def sample_pages(self, own_pages: int) -> int:
        return 0 if self.window is None else self.window.sample_pages(own_pages)

    def missing(self, held: Held, first_query: int, num_positions: int) -> list[int]:
        """Return the places of the pages not held that positions up to num_positions need, from the first
        page that the query at first_query sees."""
        if self.window is None:
            return []
        stop = -(-num_positions // self.window.page_tokens)
        return [i for i in range(self.window.first_page(first_query + 1), stop) if i not in held]

    def allocate(self, pages: list[int]) -> Held:
        return dict(zip(pages, self.pool.allocate(len(pages)), strict=True))

    def share(self, held: Held, first_query: int, stop: int) -> Held:
        """Add an owner to the pages before `stop` that the query at this position, or a later one, sees."""
        first = 0 if self.window is None else self.window.first_page(first_query + 1)
        shared = {i: page for i, page in held.items() if first <= i < stop}
        self.pool.share(list(shared.values()))
        return shared

    def give_back(self, held: Held, first_query: int) -> None:
        """Release what neither the query at this position nor a later one sees."""
        if self.window is not None:
            first = self.window.first_page(first_query + 1)
            self.pool.release([held.pop(i) for i in [i for i in held if i < first]])

    def cut(self, held: Held, num_positions: int) -> None:
        """Release the pages wholly behind num_positions positions."""
        if self.window is not None:
            stop = -(-num_positions // self.window.page_tokens)
            self.pool.release([held.pop(i) for i in [i for i in held if i >= stop]])

    def release(self, held: Held) -> None:
        self.pool.release(list(held.values()))
        held.clear()
