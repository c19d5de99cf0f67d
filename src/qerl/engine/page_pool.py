"""Reference counts of KV cache pages: a page is free or has one or more owners.

    allocate   give a free page its first owner          share   add an owner
    release    remove an owner; without any the page is free

Invariant: free + used = all, and no page is both. tests/engine/test_page_pool.py checks it under random
operations.
"""


class PagePool:
    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low pages first
        self._ref_counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def is_free(self, page: int) -> bool:
        return self._ref_counts[page] == 0

    def allocate(self, num: int) -> list[int]:
        assert 0 <= num <= len(self._free), f"cannot allocate {num} pages, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            assert self._ref_counts[page] == 0
            self._ref_counts[page] = 1
        return pages

    def share(self, pages: list[int]) -> list[int]:
        """Add an owner to each page and return the same pages."""
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is free"
            self._ref_counts[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self._ref_counts[page] > 0, f"page {page} is released twice"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free.append(page)
