import random
from collections import Counter

import pytest

from qerl.engine.schedule.page_pool import PagePool


def test_no_page_is_owned_twice_and_free_plus_used_is_all():
    rng = random.Random(0)
    pages, holdings = PagePool(40), []
    for _ in range(3000):
        action = rng.choice(("take", "share", "release"))
        if action == "take":
            num = rng.randrange(6)
            if num <= pages.num_free:
                held = {page for holding in holdings for page in holding}
                taken = pages.allocate(num)
                assert len(set(taken)) == num and not held & set(taken)
                holdings.append(taken)
        elif holdings and action == "share":
            holdings.append(pages.share(rng.choice(holdings)))
        elif holdings:
            pages.release(holdings.pop(rng.randrange(len(holdings))))
        held = Counter(page for holding in holdings for page in holding)
        assert pages.num_used == len(held) and pages.num_free + pages.num_used == 40
    for holding in holdings:
        pages.release(holding)
    assert sorted(pages.allocate(40)) == list(range(40))


def test_a_shared_page_is_free_only_after_its_last_holder():
    pages = PagePool(2)
    mine = pages.allocate(1)
    yours = pages.share(mine)
    pages.release(mine)
    assert pages.num_free == 1 and pages.allocate(1) != yours
    pages.release(yours)
    assert pages.num_free == 1


def test_releasing_or_sharing_a_free_page_is_our_bug():
    pages = PagePool(2)
    mine = pages.allocate(1)
    pages.release(mine)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(mine)
    with pytest.raises(AssertionError, match="is free"):
        pages.share(mine)
    with pytest.raises(AssertionError, match="cannot allocate 3 pages, 2 are free"):
        pages.allocate(3)
