import dataclasses
import random

import pytest

from engine.schedule.test_scheduler import PAGE_TOKENS, live_group
from qerl.engine.schedule.cache_space import CacheSpace, Space
from qerl.engine.schedule.window_pages import Window


def test_an_amount_is_at_most_another_only_if_it_is_of_every_kind():
    assert Space(1, 2, 3) <= Space(1, 2, 3) <= Space(2, 2, 3)
    for more in ({"pages": 2}, {"windowed": 3}, {"slots": 4}):
        assert not dataclasses.replace(Space(1, 2, 3), **more) <= Space(1, 2, 3)
    assert not Space(2, 1, 1) <= Space(1, 2, 2) and not Space(1, 2, 2) <= Space(2, 1, 1)


def test_amounts_add_and_multiply_by_kind_and_products_are_rounded_up():
    assert Space(1, 2, 3) + Space(10, 20, 30) == Space(11, 22, 33)
    assert Space(1, 2, 3) * 2 == Space(2, 4, 6) and Space(10, 1, 0) * 0.25 == Space(3, 1, 0)
    assert Space(1, 5, 3).at_least(Space(2, 4, 3)) == Space(2, 5, 3)
    assert not Space() and all((Space(1), Space(0, 1), Space(0, 0, 1)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_slots", [0, 50])
def test_missing_is_what_allocate_takes_and_releasable_what_release_frees(seed, num_slots):
    rng = random.Random(seed)
    window = Window(rng.choice((1, 4, 9, 30)), PAGE_TOKENS)
    space = CacheSpace(Space(1000, 1000, num_slots), PAGE_TOKENS, window=window)
    group = live_group(0, rng.randint(1, 30), rng.randint(1, 40), 5)
    prompt, free = space.prompt(group), space.free
    space.allocate_prompt(group)
    assert space.free + prompt == free
    for sample in group.samples_G:
        sample.tokens_T += [0] * rng.randint(1, group.max_tokens)
        for num_steps in (1, rng.randint(1, 20)):
            missing, free = space.missing([sample], num_steps), space.free
            space.allocate(sample, num_steps)
            assert space.free + missing == free and not space.missing([sample], num_steps)
    released, free = group.samples_G[:3], space.free
    releasable = space.releasable(released)
    for sample in released:
        space.release(sample)
    assert space.free == free + releasable + Space(slots=3 * min(num_slots, 1))
    for holder in (*group.samples_G[3:], group):
        space.release(holder)
    assert space.free == space.total
