"""Pages kept between the requests of an episode (engine/schedule/kept_pages.py)."""

import random

import pytest

from engine.schedule.test_scheduler import FakeRunner, live_group
from qerl.engine.schedule.kept_pages import KeptPages
from qerl.engine.schedule.page_pool import PagePool


class Kept:
    """A pool of 10 pages of 4 tokens, of which 6 may be kept."""

    def __init__(self, num_pages=10, max_pages=6):
        self.pool = PagePool(num_pages)
        self.kept = KeptPages(self.pool, max_pages, 4)

    def answered(self, episode, tokens_T):
        """Compute these tokens in new pages, which the request then leaves; return them."""
        pages = self.pool.allocate(-(-len(tokens_T) // 4))
        self.kept.keep(episode, tokens_T, pages)
        self.pool.release(pages)
        return pages


def test_full_pages_of_the_common_prefix_are_reused_and_the_last_token_never():
    of = Kept()
    pages = of.answered("a", list(range(10)))
    assert (of.pool.num_free, of.pool.num_kept, of.pool.num_used) == (10, 2, 0)
    longer, other = list(range(12)), [*range(6), 90, 91, 92, 93]
    assert of.kept.reuse("a", longer) == pages[:2] and of.pool.num_used == 2
    assert of.kept.reuse("a", other) == of.kept.reuse("a", longer[:8]) == pages[:1]
    assert of.kept.reuse("a", longer[:9]) == pages[:2]
    assert of.kept.reuse("b", longer) == of.kept.reuse("a", [5, *longer]) == []


def test_the_longest_prefix_is_found_and_what_goes_on_takes_the_place_of_what_it_begins_with():
    of = Kept()
    of.answered("a", [1] * 4)
    of.answered("a", [2] * 8)
    assert of.pool.num_kept == 3
    longer = of.answered("a", [1] * 4 + [3] * 4)
    assert of.pool.num_kept == 4, "the first page of the longer one is enough"
    assert of.kept.reuse("a", [1] * 4 + [3] * 9) == longer


def test_the_least_recently_used_go_first_beyond_the_budget_and_for_whoever_allocates():
    of = Kept()
    first, second, third = (of.answered(each, [each] * 8) for each in (1, 2, 3))
    assert of.pool.num_kept == 6
    of.pool.release(of.kept.reuse(1, [1] * 9))  # now 2 is the oldest
    of.answered(4, [4] * 8)
    assert of.kept.reuse(2, [2] * 9) == [] and of.pool.num_kept == 6
    assert len(of.pool.allocate(5)) == 5, "four pages are free, one is given up"
    assert of.kept.reuse(3, [3] * 9) == [] and of.kept.reuse(1, [1] * 9) == first
    assert set(first).isdisjoint(second) and set(first).isdisjoint(third)
    assert of.pool.num_free == 3 and len(of.pool.allocate(3)) == 3, "no kept page stays in the way"


def test_more_than_the_budget_is_kept_up_to_it_and_nothing_of_an_episode_that_is_over():
    of = Kept(max_pages=2)
    pages = of.answered("a", [1] * 16)
    assert of.kept.reuse("a", [1] * 17) == pages[:2]
    of.pool.release(pages[:2])
    of.kept.forget(["b"])
    assert of.pool.num_kept == 2
    of.kept.forget(["a"])
    assert of.pool.num_kept == 0 and of.kept.reuse("a", [1] * 17) == []


def test_under_random_operations_no_page_is_owned_twice_and_all_are_free_used_or_kept():
    rng, of = random.Random(0), Kept(40, 25)
    running, pool, num_reused = [], of.pool, 0
    holds: dict[int, int] = {}  # page -> what was written last
    for turn in range(4000):
        action = rng.choice(("begin", "begin", "end", "end", "abort", "over"))
        if action == "begin":
            episode = rng.randrange(5)
            tokens_T = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            if -(-len(tokens_T) // 4) > pool.num_free:
                continue
            reused = of.kept.reuse(episode, tokens_T)
            num_reused += len(reused)
            for i, page in enumerate(reused):
                assert holds[page] == hash(tuple(tokens_T[: 4 * i + 4])), "it holds another prefix"
            new = pool.allocate(-(-len(tokens_T) // 4) - len(reused))
            assert not set(new) & {page for _, _, pages in running for page in pages}
            pages = reused + new
            for i in range(len(reused), len(pages)):
                holds[pages[i]] = hash(tuple(tokens_T[: 4 * i + 4]))
            running.append((episode, tokens_T, pages))
        elif action == "over":
            of.kept.forget([rng.randrange(5)] if turn % 7 == 0 else [])
        elif running:
            episode, tokens_T, pages = running.pop(rng.randrange(len(running)))
            if action == "end":
                of.kept.keep(episode, tokens_T, pages)
            pool.release(pages)
        used = {page for _, _, pages in running for page in pages}
        kept = {page for each in of.kept._sequences for page in each.pages}
        assert pool.num_used == len(used) and pool.num_kept == len(kept - used)
        assert len(pool._free) + pool.num_used + pool.num_kept == 40
        assert set(pool._free).isdisjoint(used | kept)
        assert sum(len(each.pages) for each in of.kept._sequences) <= 25
    assert num_reused > 50
    for _, _, pages in running:
        pool.release(pages)
    assert sorted(pool.allocate(40)) == list(range(40))


def test_keeping_a_free_page_or_dropping_one_that_is_not_kept_is_our_bug():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="is not kept"):
        pool.drop([page])
    pool.release([page])
    with pytest.raises(AssertionError, match="has no owner"):
        pool.keep([page])


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_changes_nothing_in_whom_the_scheduler_admits_runs_and_preempts(seed):
    def ran(kept_pages):
        """Two calls of each of 15 episodes; the second ones begin when all first ones have ended."""
        rng = random.Random(seed)
        sizes = [(rng.randrange(1, 20), rng.randrange(1, 16), rng.randrange(1, 3)) for _ in range(30)]
        groups = [live_group(index, *size) for index, size in enumerate(sizes)]
        for group in groups:
            group.episode = min(group.index, 29 - group.index)  # those that are still kept come first
        first, second = groups[:15], groups[15:]
        runner = FakeRunner(first, total_pages=24, max_num_seqs=6, max_kept_pages=kept_pages).run()
        runner.groups = groups
        runner.scheduler.add(second)
        runner.run()
        happened = [s.age for s in runner.scheduled], runner.batch_sizes, runner.scheduler.num_preemptions
        return happened, sum(group.num_reused for group in groups)

    (without, none), (with_kept, reused) = ran(0), ran(24)
    assert without == with_kept and none == 0 < reused
