import random

import pytest

from qerl.engine.schedule.cache_space import CacheSpace, Space
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.engine.schedule.page_pool import min_group_pages, num_pages
from qerl.engine.schedule.scheduler import Scheduler
from qerl.types import Prompt

PAGE_TOKENS = 4


def live_group(index, prompt_tokens, max_tokens, num_samples):
    prompt = Prompt(index=index, text="", tokens_T=[0] * prompt_tokens, messages=None, columns={})
    group = LiveGroup(
        index=index, prompt=prompt, coordinates=(), prompt_tokens=prompt_tokens, max_tokens=max_tokens
    )
    group.samples_G = [LiveSample(group=group, sample_index=g) for g in range(num_samples)]
    return group


class FakeRunner:
    """Draws no tokens, only counts them: a sample is done after as many as `lengths` says."""

    def __init__(
        self,
        groups,
        *,
        total_pages,
        max_num_seqs,
        lengths=None,
        num_states=None,
        num_window_pages=0,
        **of_space,
    ):
        self.groups, self.lengths = groups, lengths or {}
        total = Space(total_pages, num_window_pages, num_states or 0)
        space = CacheSpace(total, PAGE_TOKENS, **of_space)
        self.pages, self.states = space.pages, None if num_states is None else space.slots
        self.scheduler = Scheduler(groups, space, max_num_seqs=max_num_seqs)
        self.scheduled, self.admissions = [], []
        self.finished, self.batch_sizes = [], []

    def draw(self, samples):
        for s in samples:
            s.tokens_T.append(0)
            length = self.lengths.get((s.group.index, s.sample_index), s.group.max_tokens)
            s.finish = "length" if len(s.tokens_T) == length else None
        done = [s for s in samples if s.finish]
        self.finished += done
        self.scheduler.finish(done)

    def turn(self):
        assert not self.scheduler.is_done
        self.scheduler.allocate()
        self.scheduled += self.scheduler.schedule()
        live = [s for group in self.admissions for s in group.samples_G if s.finish is None]
        waiting = [s for s in live if not s.is_running]
        admitted = self.scheduler.admit()
        assert not (admitted and waiting), "a prompt is computed while older samples wait"
        self.admissions += admitted
        self.draw([s for group in admitted for s in group.samples_G])
        self.scheduled += self.scheduler.schedule()
        self.check()
        if self.scheduler.running:
            self.batch_sizes.append(len(self.scheduler.running))
            self.draw(self.scheduler.running)

    def check(self):
        running = self.scheduler.running
        order = [(s.group.index, s.sample_index) for s in running]
        assert order == sorted(order), "running samples are kept oldest first"
        assert all(s.is_running for s in running)
        own = [page for s in running for page in s.pages[s.group.prompt_tokens // PAGE_TOKENS :]]
        prompts = [page for group in self.groups for page in group.pages]
        assert len(own) == len(set(own)) and not set(own) & set(prompts)
        assert self.pages.num_used == len(own) + len(prompts)
        for s in running:
            assert len(s.pages) == num_pages(s.num_positions, PAGE_TOKENS)
        if self.states is not None:
            slots = [slot for holder in (*running, *self.groups) for slot in holder.state]
            assert len(slots) == len(set(slots)) == self.states.num_used, "a slot has one holder"
            assert all(len(s.state) == len(s.group.state) == 1 for s in running)

    def run(self):
        turns = 0
        while not self.scheduler.is_done:
            self.turn()
            turns += 1
            assert turns < 10_000, "the scheduler makes no progress"
        assert self.pages.num_used == 0 and (self.states is None or self.states.num_used == 0)
        return self


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_finishes_with_as_few_pages_as_the_largest_needs(seed):
    rng = random.Random(seed)
    groups = [live_group(i, rng.randint(1, 14), rng.randint(1, 20), rng.randint(1, 5)) for i in range(8)]
    least = max(min_group_pages(g.prompt_tokens, g.max_tokens, PAGE_TOKENS) for g in groups)
    lengths = {(g.index, s.sample_index): rng.randint(1, g.max_tokens) for g in groups for s in g.samples_G}
    total_pages = least + rng.choice((0, 1, 5, 20))
    num_states = rng.choice((None, 2, 3, 8, 100))
    runner = FakeRunner(
        groups,
        total_pages=total_pages,
        max_num_seqs=rng.randint(1, 12),
        lengths=lengths,
        num_states=num_states,
    ).run()
    assert len(runner.finished) == len(lengths)
    for group in groups:
        for s in group.samples_G:
            assert len(s.tokens_T) == lengths[group.index, s.sample_index]


@pytest.mark.parametrize("seed", range(10))
def test_no_sample_is_overtaken_so_none_starves(seed):
    rng = random.Random(seed)
    groups = [live_group(i, rng.randint(1, 9), 24, 4) for i in range(6)]
    least = max(min_group_pages(g.prompt_tokens, 24, PAGE_TOKENS) for g in groups)
    runner = FakeRunner(groups, total_pages=least + 6, max_num_seqs=6)
    unfinished = [s for group in groups for s in group.samples_G]
    while not runner.scheduler.is_done:
        runner.turn()
        unfinished = [s for s in unfinished if s.finish is None]
        is_running = [s.is_running for s in unfinished]
        assert is_running == sorted(is_running, reverse=True), (
            "a younger sample runs while an older one waits"
        )
    assert runner.scheduler.num_preemptions > 0


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens():
    group = live_group(0, 4, 21, 2)  # 1 page of prompt; a sample fills 5 more
    runner = FakeRunner([group], total_pages=8, max_num_seqs=2)
    old, young = group.samples_G
    while runner.scheduler.num_preemptions == 0:
        runner.turn()
    assert runner.scheduler.running == [old] and not young.is_running and young.pages == []
    kept = len(young.tokens_T)
    assert kept > 1
    runner.run()
    assert runner.scheduled == [old, young, young]
    assert len(young.tokens_T) == 21 and runner.finished == [old, young]


def test_a_prompt_is_admitted_once_however_often_its_samples_are_preempted():
    groups = [live_group(i, 6, 16, 4) for i in range(3)]
    runner = FakeRunner(groups, total_pages=12, max_num_seqs=12).run()
    assert runner.scheduler.num_preemptions > 0
    assert runner.admissions == groups


def test_samples_of_a_group_share_the_prompts_full_pages():
    group = live_group(0, 2 * PAGE_TOKENS + 1, 2, 5)
    runner = FakeRunner([group], total_pages=50, max_num_seqs=5)
    runner.scheduler.admit()
    runner.draw(group.samples_G)
    runner.scheduler.schedule()
    assert runner.pages.num_used == 3 + 5  # the prompt's three pages, and a copy of its last for each
    assert len({tuple(s.pages[:2]) for s in group.samples_G}) == 1
    assert len({s.pages[2] for s in group.samples_G} | {group.pages[2]}) == 6


def test_the_prompts_pages_stay_until_the_last_sample_of_the_group():
    group = live_group(0, 5, 9, 3)
    runner = FakeRunner([group], total_pages=50, max_num_seqs=3, lengths={(0, 0): 1, (0, 1): 2})
    runner.turn()
    assert [s.finish for s in group.samples_G] == ["length", "length", None]
    assert len(group.pages) == 2 and group.num_unfinished == 1
    runner.run()
    assert group.pages == []


def test_finished_samples_leave_at_once_and_waiting_ones_take_their_place():
    groups = [live_group(i, 3, 8, 1) for i in range(4)]
    lengths = {(0, 0): 3, (1, 0): 8, (2, 0): 4, (3, 0): 2}
    runner = FakeRunner(groups, total_pages=100, max_num_seqs=2, lengths=lengths).run()
    # Rows by turn: 0 and 1 until 0 ends; 2 and 1; 3 and 1; then 1 alone.
    assert runner.batch_sizes == [2, 2, 2, 2, 2, 2, 1]
    assert [s.group.index for s in runner.finished] == [0, 2, 3, 1]


def test_a_group_is_not_admitted_while_its_samples_could_not_run():
    groups = [live_group(i, 4, 13, 2) for i in range(5)]
    runner = FakeRunner(groups, total_pages=12, max_num_seqs=10)
    runner.turn()
    assert runner.admissions == groups[:2]  # 1 + 2 * 2 pages for each, one more prompt would leave 1


def test_prompts_are_admitted_for_the_free_rows_only():
    groups = [live_group(i, 4, 8, 4) for i in range(6)]
    runner = FakeRunner(groups, total_pages=200, max_num_seqs=10)
    runner.turn()
    assert runner.admissions == groups[:3]


@pytest.mark.parametrize(
    ("prompt_tokens", "num_states", "expected"), [(600, None, 5), (1500, None, 3), (8, None, 6), (600, 90, 2)]
)
def test_some_prompts_are_admitted_ahead_so_that_a_prefill_is_worth_its_launches(
    prompt_tokens, num_states, expected
):
    """With the first, up to 2,048 tokens, but no more samples than a quarter of the rows; none where states
    need slots."""
    groups = [live_group(0, 8, 50, 31), *(live_group(i, prompt_tokens, 8, 2) for i in range(1, 12))]
    lengths = {(0, g): 4 + g for g in range(31)}
    runner = FakeRunner(groups, total_pages=10_000, max_num_seqs=32, lengths=lengths, num_states=num_states)
    runner.scheduler._not_admitted = type(runner.scheduler._not_admitted)(groups[:1])
    runner.turn()
    runner.scheduler.add(groups[1:])
    runner.turn()
    assert len(runner.admissions) == expected
    runner.run()


def test_the_more_tokens_a_prefill_is_worth_the_more_samples_are_admitted_ahead():
    found = []
    for least in (2048, 4096, 16_384):
        groups = [live_group(i, 100, 8, 2) for i in range(200)]
        space = CacheSpace(Space(10_000, 0, 0), PAGE_TOKENS)
        scheduler = Scheduler(groups, space, max_num_seqs=32, min_prefill_tokens=least)
        found.append(len(scheduler.admit()))
    assert found == [20, 24, 48]  # 2 samples each: the rows, and a quarter, a half, twice as many more


def test_the_batch_is_rebuilt_for_one_sample_in_32_or_the_last_ones():
    groups = [live_group(0, 4, 99, 128), live_group(1, 4, 9, 6)]
    runner = FakeRunner(groups, total_pages=10_000, max_num_seqs=128)
    scheduler = runner.scheduler
    runner.turn()
    found = []
    for ended in range(6):
        found.append(scheduler.can_fill_rows)
        scheduler.finish([scheduler.running[-1 - ended]])
    assert found == [False, False, False, False, True, True]
    alone = FakeRunner([live_group(0, 4, 99, 128)], total_pages=10_000, max_num_seqs=128)
    alone.turn()
    assert not alone.scheduler.can_fill_rows
    alone.scheduler.add([live_group(1, 4, 9, 1)])
    assert not alone.scheduler.can_fill_rows
    alone.scheduler.finish(alone.scheduler.running[:1])
    assert alone.scheduler.can_fill_rows


def test_a_newcomer_leaves_every_running_sample_a_page_to_grow_into():
    group = live_group(0, 4, 13, 4)  # 1 page of prompt; a sample enters with 1 more and fills 3
    runner = FakeRunner([group], total_pages=1 + 5, max_num_seqs=4)
    runner.turn()
    assert len(runner.scheduler.running) == 2  # a page each and one to grow into; three need 6
    while len(runner.scheduler.running) == 2:
        runner.turn()
    old, young = group.samples_G[:2]
    assert not young.is_running and runner.scheduler.num_preemptions == 1
    while not young.is_running:
        runner.turn()
    assert old.finish is not None, "it came back while the older one could still need its pages"
    runner.run()


def test_as_many_samples_run_as_have_a_slot_for_their_states():
    group = live_group(0, 4, 8, 4)
    runner = FakeRunner([group], total_pages=50, max_num_seqs=4, num_states=3)
    runner.turn()
    assert len(runner.scheduler.running) == 2 and runner.states.num_free == 0  # the third is the prompt's
    runner.run()


def test_a_group_is_admitted_only_if_a_slot_is_left_for_each_newcomer():
    groups = [live_group(i, 4, 8, 2) for i in range(3)]
    runner = FakeRunner(groups, total_pages=50, max_num_seqs=12, num_states=6)
    runner.turn()
    assert runner.admissions == groups[:2] and len(runner.scheduler.running) == 4
    runner.run()


def test_a_preempted_sample_gives_its_slot_back():
    group = live_group(0, 4, 21, 2)
    runner = FakeRunner([group], total_pages=8, max_num_seqs=2, num_states=3)
    while runner.scheduler.num_preemptions == 0:
        runner.turn()
    old, young = group.samples_G
    assert young.state == [] and len(old.state) == 1 and runner.states.num_free == 1
    runner.run()


def test_branches_start_from_their_prompts_slot():
    group = live_group(0, 6, 9, 2)
    group.keeps_pages = True
    runner = FakeRunner([group], total_pages=50, max_num_seqs=4, num_states=3)
    while not runner.scheduler.is_done:
        runner.turn()
    assert runner.states.num_used == 1 and runner.pages.num_used > 0
    branch = live_group(0, 8, 7, 2)
    branch.parent = group.samples_G[0]
    for sample in branch.samples_G:
        sample.tokens_T = [0]
    prompt_slot = group.state
    runner.scheduler.branch([branch])
    assert branch.state == prompt_slot and runner.states.num_used == 1
    scheduled = runner.scheduler.schedule()
    assert len({s.state[0] for s in scheduled} | set(branch.state)) == 3
    runner.scheduler.finish(scheduled)
    assert runner.states.num_used == runner.pages.num_used == 0


@pytest.mark.parametrize("has_overrun", (False, True))
def test_a_parked_sample_keeps_its_states_unless_the_device_ran_past_its_end(has_overrun):
    group = live_group(0, 4, 8, 1)
    runner = FakeRunner([group], total_pages=50, max_num_seqs=4, num_states=2)
    runner.turn()
    (sample,) = group.samples_G
    sample.has_overrun = has_overrun
    runner.scheduler.park([sample])
    if has_overrun:
        assert not sample.state and not sample.pages and sample.num_cached == 0
    else:
        assert sample.state and sample.pages and sample.num_cached == sample.num_positions - 1
    before = list(sample.state)
    runner.scheduler.resume([sample])
    assert runner.scheduler.schedule() == [sample] and len(sample.state) == 1
    assert has_overrun or sample.state == before
