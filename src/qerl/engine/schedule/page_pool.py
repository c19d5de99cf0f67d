"""Number of pages that positions need, and reference counts: a page is free or has one or more owners.

    allocate   give a free page its first owner          share   add an owner
    release    remove an owner; without any the page is free
    keep       let a page hold what it does after its last owner, until `drop`

Invariant: free + used = all, and no page is both. Kept pages without an owner count as free: `allocate` has
them evicted if there are too few others. tests/engine/schedule/test_page_pool.py and test_kept_pages.py check
it under random operations.
"""

from collections.abc import Callable


def num_pages(num_positions: int, page_tokens: int) -> int:
    return -(-num_positions // page_tokens)


def own_pages(prompt_tokens: int, max_tokens: int, page_tokens: int) -> int:
    """Return the pages of a longest sample besides its prompt's full ones. Its last token is never cached."""
    return num_pages(prompt_tokens + max_tokens - 1, page_tokens) - prompt_tokens // page_tokens


def min_group_pages(prompt_tokens: int, max_tokens: int, page_tokens: int) -> int:
    """Return the pages of a prompt and one of its samples: with fewer in all, the group can never run."""
    return num_pages(prompt_tokens, page_tokens) + own_pages(prompt_tokens, max_tokens, page_tokens)


class PagePool:
    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.evict: Callable[[], None] | None = None
        """Drops some of the kept pages."""
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low pages first
        self._ref_counts = [0] * num_pages
        self._keep_counts = [0] * num_pages
        self.num_kept = 0  # pages without an owner

    @property
    def num_free(self) -> int:
        """Number of pages that may be allocated, kept ones included."""
        return len(self._free) + self.num_kept

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def is_free(self, page: int) -> bool:
        return self._ref_counts[page] == 0

    def allocate(self, num: int) -> list[int]:
        assert 0 <= num <= self.num_free, f"cannot allocate {num} pages, {self.num_free} are free"
        while num > len(self._free):
            assert self.evict is not None
            self.evict()
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            assert self._ref_counts[page] == self._keep_counts[page] == 0
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """Add an owner to each page and return the same pages."""
        for page in pages:
            assert self._ref_counts[page] + self._keep_counts[page] > 0, f"page {page} is free"
            self.num_kept -= self._ref_counts[page] == 0
            self._ref_counts[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is released twice"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if self._keep_counts[page]:
                    self.num_kept += 1
                else:
                    self._free.append(page)

    def keep(self, pages: list[int]) -> None:
        """Keep pages that have owners; each `keep` needs a `drop`."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} has no owner"
            self._keep_counts[page] += 1

    def drop(self, pages: list[int]) -> None:
        for page in pages:
            assert self._keep_counts[page] > 0, f"page {page} is not kept"
            self._keep_counts[page] -= 1
            if self._ref_counts[page] == self._keep_counts[page] == 0:
                self.num_kept -= 1
                self._free.append(page)
