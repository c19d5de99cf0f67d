"""Counts who uses which page of the KV cache: a page is free, or owned by one or more holders.

    take     a free page gets its first holder          share   one holder more
    release  one holder less; with none left it is free

Always: free + used = all, and no page is both. tests/engine/test_page_pool.py holds it under random operations.
"""


class PagePool:
    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low pages first
        self._num_holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def take(self, num: int) -> list[int]:
        """`num` pages nobody holds."""
        assert 0 <= num <= len(self._free), f"{num} pages wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(num)]
        for page in taken:
            assert self._num_holders[page] == 0
            self._num_holders[page] = 1
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """The same pages, held once more."""
        for page in pages:
            assert self._num_holders[page] > 0, f"page {page} is free"
            self._num_holders[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self._num_holders[page] > 0, f"page {page} is released twice"
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                self._free.append(page)
