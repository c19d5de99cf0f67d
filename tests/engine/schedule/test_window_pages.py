"""Layers with a window hold the pages of their window: the same samples, from fewer pages."""

import dataclasses
import random

import pytest
import torch

from engine.parts import branched, drawn, engine_of, prompts_of
from engine.schedule.test_scheduler import PAGE_TOKENS, live_group
from engine.test_conversation import FakeTalk, Talk, talked
from models.tiny import tiny
from qerl.config import EngineConfig
from qerl.config.recipes import demo_long
from qerl.cost.cache import page_bytes
from qerl.engine.cache import size as cache_size
from qerl.engine.schedule.cache_space import CacheSpace, Space
from qerl.engine.schedule.page_pool import min_group_pages
from qerl.engine.schedule.scheduler import Scheduler
from qerl.engine.schedule.window_pages import Window, WindowPages, windowed_layers
from qerl.errors import UserError
from qerl.kernels.attention.attention_options import AttentionOptions
from qerl.learner.plan.memory import kv_cache_bytes
from qerl.models.architecture import LayerKind
from qerl.models.decoder import Layer

MIXED, ALL = (7, None, 7), (7, 5, 7)
LENGTHS = (9, 31, 40, 3)
FEW = frozenset({2})


def windowed(windows, **changes):
    """A tiny decoder of three layers with these windows."""
    decoder = tiny(**changes)
    kinds = tuple(LayerKind(window=window) for window in windows)
    decoder.architecture = dataclasses.replace(decoder.architecture, layer_kinds=kinds)
    for layer, window in zip(decoder.layers, windows, strict=True):
        assert isinstance(layer, Layer)
        layer.self_attn.options = AttentionOptions(window=window)
    return decoder


@pytest.fixture
def both(monkeypatch):
    """Return (what it returns without pages of their own for windows, what it returns with them)."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(cache_size, "Window", NoWindow)
            without = function()
        return without, function()

    return call


class NoWindow:
    of = staticmethod(lambda a, page_tokens: None)


def found(samples):
    return [(s.tokens_T, s.logprobs_T, s.finish) for s in samples]


def kv_gb(decoder, num_pages, page_tokens=4):
    return (num_pages + 0.5) * page_bytes(decoder.architecture, page_tokens, torch.float32) / 1e9


@pytest.fixture
def most_held(monkeypatch):
    """The most pages of layers with a window that a running sample held when pages were allocated."""
    most, allocate = [0], Scheduler.allocate

    def counted(self, num_steps=1):
        extended = allocate(self, num_steps)
        most[0] = max([most[0], *(len(s.window_pages) for s in self.running)])
        return extended

    monkeypatch.setattr(Scheduler, "allocate", counted)
    return most


@pytest.mark.parametrize(("burst_steps", "max_num_batched_tokens"), [(1, 200), (4, 13)])
@pytest.mark.parametrize("windows", [MIXED, ALL], ids=["mixed", "all"])
def test_samples_are_those_without_giving_back(windows, burst_steps, max_num_batched_tokens, both):
    """Bit for bit."""
    decoder = windowed(windows)

    def sample():
        engine = engine_of(
            decoder,
            block_size=4,
            decode_steps_per_sync=burst_steps,
            max_num_batched_tokens=max_num_batched_tokens,
            stop_token_ids=FEW,
        )
        return found(drawn(engine, prompts_of(*LENGTHS), max_tokens=60)), engine.stats

    (without, _), (given, stats) = both(sample)
    assert given == without and max(len(tokens_T) for tokens_T, _, _ in given) == 60
    assert 0 < stats.peak_window_pages < stats.peak_pages


@pytest.mark.parametrize("windows", [MIXED, ALL], ids=["mixed", "all"])
def test_fp8_pages_are_given_back_too(windows, both):
    decoder = windowed(windows)
    settings = {"block_size": 4, "kv_cache_dtype": "fp8", "max_num_batched_tokens": 13, "stop_token_ids": FEW}
    without, given = both(
        lambda: found(drawn(engine_of(decoder, **settings), prompts_of(*LENGTHS), max_tokens=60))
    )
    assert given == without


@pytest.mark.parametrize(("windows", "burst_steps"), [(MIXED, 4), (ALL, 1)], ids=["mixed", "all"])
def test_a_sample_of_any_length_holds_the_pages_of_its_window(windows, burst_steps, most_held):
    decoder, held = windowed(windows), []
    for max_tokens in (40, 120):
        settings = {"block_size": 4, "decode_steps_per_sync": burst_steps, "stop_token_ids": frozenset()}
        engine = engine_of(decoder, **settings)
        most_held[0] = 0
        samples = drawn(engine, prompts_of(9), num_samples=2, max_tokens=max_tokens)
        assert all(len(s.tokens_T) == max_tokens for s in samples)
        held.append((most_held[0], engine.stats.peak_window_pages))
        assert engine.stats.peak_pages > max_tokens // 4
    assert held[0] == held[1], "three times as long, and not a page more"
    window = Window(7, 4)
    assert held[0][0] <= window.max_pages + -(-2 * burst_steps // 4), "two bursts ahead"
    assert window.max_pages == 3


@pytest.mark.parametrize("windows", [MIXED, ALL], ids=["mixed", "all"])
def test_pages_that_were_given_back_are_never_read(windows, monkeypatch):
    """They get numbers that a sample could not overlook."""
    decoder = windowed(windows)
    settings = {"block_size": 4, "stop_token_ids": FEW}
    plain = found(drawn(engine_of(decoder, **settings), prompts_of(*LENGTHS), max_tokens=60))
    engine, given, give_back = engine_of(decoder, **settings), [], WindowPages.give_back

    def poisoning(self, held, first_query):
        before = dict(held)
        give_back(self, held, first_query)
        gone = [page for i, page in before.items() if i not in held and not self.pool._ref_counts[page]]
        cache = engine._cache
        assert cache is not None and cache.windowed is not None
        for tensor in cache.windowed.tensors:
            tensor[:, gone] = 1e20
        given.extend(gone)

    monkeypatch.setattr(WindowPages, "give_back", poisoning)
    assert found(drawn(engine, prompts_of(*LENGTHS), max_tokens=60)) == plain and len(given) > 20


@pytest.mark.parametrize(("windows", "burst_steps"), [(MIXED, 3), (ALL, 1)], ids=["mixed", "all"])
def test_a_preempted_sample_goes_on_as_if_it_had_not_been(windows, burst_steps):
    decoder = windowed(windows)
    settings = {"block_size": 4, "max_num_batched_tokens": 11, "stop_token_ids": FEW}
    plain = drawn(engine_of(decoder, **settings), prompts_of(*LENGTHS), max_tokens=60)
    few = 12 if windows == ALL else 24
    engine = engine_of(
        decoder, kv_cache_gb=kv_gb(decoder, few), decode_steps_per_sync=burst_steps, **settings
    )
    samples = drawn(engine, prompts_of(*LENGTHS), max_tokens=60)
    assert engine.stats.num_preemptions > 0
    assert [s.tokens_T for s in samples] == [s.tokens_T for s in plain]
    for ours, theirs in zip(samples, plain, strict=True):
        assert ours.logprobs_T == pytest.approx(theirs.logprobs_T, abs=1e-4)


@pytest.mark.parametrize(("windows", "num_pages"), [(ALL, None), (MIXED, 26)], ids=["all", "mixed"])
def test_a_conversation_is_the_one_without_giving_back(windows, num_pages, both):
    decoder = windowed(windows)
    settings: dict = {"block_size": 4, "max_num_batched_tokens": 11}
    if num_pages is not None:
        settings["kv_cache_gb"] = kv_gb(decoder, num_pages)
    without, given = both(lambda: talked(engine_of(decoder, **settings), Talk()))
    assert [s.tokens_T for s in given] == [s.tokens_T for s in without]
    for ours, theirs in zip(given, without, strict=True):
        assert ours.logprobs_T == pytest.approx(theirs.logprobs_T, abs=1e-4)
    if num_pages is None:
        assert found(given) == found(without)


@pytest.mark.parametrize(("windows", "num_pages"), [(ALL, 80), (MIXED, None)], ids=["all", "mixed"])
def test_branches_are_those_without_giving_back(windows, num_pages, both):
    decoder = windowed(windows)
    settings = {"block_size": 4, "stop_token_ids": FEW, "max_num_batched_tokens": 11}
    if num_pages is not None:
        settings["kv_cache_gb"] = kv_gb(decoder, num_pages)

    def sample():
        return branched(engine_of(decoder, **settings), prompts_of(9, 31, 14), max_tokens=30)

    (_, without, _, _), (_, given, _, _) = both(sample)
    ours, theirs = ([s for group in groups for s in group.samples_G] for groups in (given, without))
    assert [s.tokens_T for s in ours] == [s.tokens_T for s in theirs] and len(ours) > 6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprobs_T == pytest.approx(other.logprobs_T, abs=1e-4)


@pytest.mark.parametrize("windows", [MIXED, ALL], ids=["mixed", "all"])
def test_the_same_memory_runs_more_samples_at_once(windows, both):
    """Samples of 18 windows, in the memory of five that keep everything: forwards for 20 of them."""
    decoder = windowed(windows)
    settings = {"block_size": 4, "kv_cache_gb": kv_gb(decoder, 5 * 34 + 3), "stop_token_ids": frozenset()}

    def sample():
        engine = engine_of(decoder, decode_steps_per_sync=4, **settings)
        drawn(engine, prompts_of(9), num_samples=20, max_tokens=126)
        return engine.stats

    without, given = both(sample)
    assert without.decode_forwards > 300 and without.num_preemptions > given.num_preemptions
    assert given.decode_forwards < (200 if windows == MIXED else 126)


def test_a_window_that_never_takes_effect_needs_no_fewer_pages():
    window = Window(300, 4)
    assert window.prompt_pages(40) == 10 and window.first_page(300) == 0 and window.first_page(304) == 1
    assert window.sample_pages(12) == window.running_pages(12) == 12


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 16, 17, 33])
def test_the_first_page_of_a_window_is_the_first_that_a_query_sees(size, page_tokens):
    window = Window(size, page_tokens)
    for n in range(1, 100):
        seen = {j // page_tokens for j in range(max(n - size, 0), n)}
        assert window.first_page(n) == min(seen) and len(seen) <= window.max_pages
        before = {j // page_tokens for j in range(max(n - size, 0), n - 1)}
        assert len(before) <= window.prompt_pages(n - 1) <= len(before) + (size == 1)


def test_a_budget_too_small_is_named_with_both_kinds():
    decoder = windowed(MIXED)
    engine = engine_of(decoder, block_size=4, kv_cache_gb=kv_gb(decoder, 4))
    with pytest.raises(UserError, match=r"needs 25 and 9 pages of KV cache .*raise it to 0\.0001 or more"):
        drawn(engine, prompts_of(40), max_tokens=60)
    enough = engine_of(decoder, block_size=4, kv_cache_gb=0.0001)
    assert len(drawn(enough, prompts_of(40), max_tokens=60)) == 3


def test_exact_engines_and_decoders_without_windows_have_one_kind_of_page():
    for decoder, exact in ((windowed(MIXED), True), (tiny(), False)):
        engine = engine_of(decoder, exact=exact)
        drawn(engine, prompts_of(9))
        assert engine._cache is not None and engine._cache.windowed is None
        assert engine.stats.peak_window_pages == 0
    assert windowed_layers(windowed(MIXED).architecture) == (0, 2)


class WindowedTalk(FakeTalk):
    """With pages for windows: who runs holds what it reads, and no page has two owners."""

    def __init__(self, groups, **settings):
        super().__init__(groups, **settings)
        self.windows = self.scheduler.space.windows

    def check(self):
        super().check()
        live = [s for group in self.admissions for s in group.samples_G if s not in self.finished]
        groups = [g for g in self.groups if g.window_pages]
        own = [
            p for s in live for i, p in s.window_pages.items() if i >= s.group.prompt_tokens // PAGE_TOKENS
        ]
        prompts = [page for g in groups for page in g.window_pages.values()]
        assert len(own) == len(set(own)) and not set(own) & set(prompts)
        assert self.windows.pool.num_used == len(own) + len(prompts)
        for s in self.scheduler.running:
            assert not self.windows.missing(s.window_pages, s.first_query, s.num_positions)

    def run(self):
        super().run()
        assert self.windows.pool.num_used == 0
        return self


@pytest.mark.parametrize("seed", range(20))
def test_conversations_end_with_as_few_window_pages_as_the_largest_needs(seed):
    rng = random.Random(seed)
    groups = [live_group(i, rng.randint(1, 30), rng.randint(1, 60), rng.randint(1, 5)) for i in range(8)]
    window = Window(rng.choice((1, 2, 4, 5, 9, 17, 100)), PAGE_TOKENS)
    least = max(min_group_pages(g.prompt_tokens, g.max_tokens, PAGE_TOKENS) for g in groups)
    most = [
        window.prompt_pages(g.prompt_tokens)
        + window.sample_pages(min_group_pages(g.prompt_tokens, g.max_tokens, PAGE_TOKENS))
        for g in groups
    ]
    runner = WindowedTalk(
        groups,
        window=window,
        num_window_pages=max(most) + rng.choice((0, 1, 5)),
        total_pages=least + rng.choice((0, 5, 200)),
        max_num_seqs=rng.randint(1, 12),
        rng=rng,
    ).run()
    assert len(runner.finished) == sum(len(g.samples_G) for g in groups)


def run_to_end(scheduler, rng, kept):
    """Draw until nothing is left; note the window pages of each sample that ends."""
    windows = scheduler.space.windows
    while not scheduler.is_done:
        scheduler.allocate()
        scheduler.schedule()
        for s in [s for group in scheduler.admit() for s in group.samples_G]:
            s.tokens_T.append(0)
        scheduler.schedule()
        for s in scheduler.running:
            assert not windows.missing(s.window_pages, s.first_query, s.num_positions)
            s.tokens_T.append(0)
            if len(s.tokens_T) == s.group.max_tokens or rng.random() < 0.05:
                s.finish, kept[s] = "stop", dict(s.window_pages)
        scheduler.finish([s for s in scheduler.running if s.finish])


def branch_at(parent, shared):
    branch = live_group(parent.group.index, parent.group.prompt_tokens + shared, 30 - shared, 2)
    branch.parent = parent
    for s in branch.samples_G:
        s.tokens_T.append(0)
    return branch


@pytest.mark.parametrize("seed", range(10))
def test_branches_hold_their_parents_windows_and_leave_nothing(seed):
    rng, kept = random.Random(seed), {}
    window = Window(rng.choice((1, 3, 6, 20)), PAGE_TOKENS)
    groups = [live_group(i, rng.randint(1, 20), 30, 3) for i in range(3)]
    space = CacheSpace(Space(1000, 1000), PAGE_TOKENS, window=window)
    scheduler, windows = Scheduler(groups, space, max_num_seqs=20), space.windows
    for group in groups:
        group.keeps_pages = True
    run_to_end(scheduler, rng, kept)
    parents = [s for group in groups for s in group.samples_G[:2] if len(s.tokens_T) > 2]
    branches = [branch_at(s, rng.randrange(len(s.tokens_T) - 1)) for s in parents]
    scheduler.branch(branches)
    for branch in branches:
        P = branch.prompt_tokens
        assert not windows.missing(branch.window_pages, P, P)
        assert all(kept[branch.parent][i] == page for i, page in branch.window_pages.items())
    run_to_end(scheduler, rng, {})
    assert space.pages.num_used == windows.pool.num_used == 0


def test_the_plan_counts_the_pages_of_windows():
    """Samples of many windows: nearly two thirds of the cache's bytes, where two layers of three have one."""
    engine = EngineConfig(block_size=16, kv_cache_dtype="auto")
    config = dataclasses.replace(demo_long(), engine=engine)
    sample = dataclasses.replace(config.sample, max_tokens=3200)
    config = dataclasses.replace(config, sample=sample, num_prompts=2, num_generations=4)
    plain = tiny().architecture
    with_windows = windowed((32, None, 32)).architecture
    every, fewer = (kv_cache_bytes(a, config, 64) for a in (plain, with_windows))
    assert 0.34 < fewer / every < 0.37
    exact = dataclasses.replace(config, engine=dataclasses.replace(engine, exact=True))
    assert kv_cache_bytes(with_windows, exact, 64) == every
