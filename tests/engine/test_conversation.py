"""A sample that continues after its turn: it keeps its pages and computes the new tokens only."""

import random

import pytest
import torch

from engine.parts import EOS, engine_of, packed_logprobs, prompts_of, request_of, tokens_of
from engine.schedule.test_scheduler import PAGE_TOKENS, FakeRunner, live_group
from engine.test_engine import assert_same, kv_gb_for
from models.tiny import tiny
from qerl.engine.schedule.page_pool import min_group_pages, num_pages
from qerl.types import Sampling

LENGTHS = (9, 31, 1, 16, 17)
MAX_TOKENS = 60


@pytest.fixture(scope="module")
def decoder():
    return tiny()


class Talk:
    """Gives 1 to 7 tokens after each turn, a function of the sample and the turn; over after num_turns."""

    def __init__(self, num_turns=3, turn_tokens=None):
        self.num_turns, self.turn_tokens = num_turns, turn_tokens
        self.rounds, self.turns, self.given = [], {}, {}

    def answer(self, turns):
        self.rounds.append(len(turns))
        return [self._one(turn) for turn in turns]

    def _one(self, turn):
        key = turn.index, turn.sample_index
        heard = self.turns.setdefault(key, [])
        heard.append(turn)
        rng = random.Random(f"{key} {len(heard)}")
        given_T = [rng.randrange(50) for _ in range(rng.randint(1, 7))]
        if len(heard) == self.num_turns or len(given_T) >= turn.num_left:
            return None
        self.given.setdefault(key, []).append(given_T)
        return given_T


def talked(engine, talk, prompts_P=None, **settings):
    request = request_of(prompts_P or prompts_of(*LENGTHS), **({"max_tokens": MAX_TOKENS} | settings))
    groups = engine.generate(request, conversation=talk)
    return [s for group in groups for s in group.samples_G]


@pytest.mark.parametrize("settings", [{}, {"decode_steps_per_sync": 4, "block_size": 4}], ids=str)
def test_a_samples_tokens_are_its_turns_and_what_it_was_given_between_them(decoder, settings):
    talk = Talk()
    samples = talked(engine_of(decoder, **settings), talk)
    assert max(map(len, talk.turns.values())) == 3
    for i, sample in enumerate(samples):
        key = i // 3, i % 3
        turns, given = talk.turns[key], talk.given.get(key, [])
        parts = [turns[0].tokens_T]
        for given_T, turn in zip(given, turns[1:], strict=True):
            parts += [given_T, turn.tokens_T]
        assert sample.tokens_T == [token for part in parts for token in part]
        assert [[sample.tokens_T[place] for place in places] for places in sample.environment_spans] == given
        assert [sample.tokens_T[p] for p in sample.sampled_indices] == [
            t for turn in turns for t in turn.tokens_T
        ]
        assert len(sample.logprobs_T) == len(sample.sampled_indices)
        left = [MAX_TOKENS - sum(map(len, parts[: 2 * n + 1])) for n in range(len(turns))]
        assert [turn.num_left for turn in turns] == left


@pytest.mark.parametrize(
    ("settings", "temperature"), [({}, 1.0), ({"decode_steps_per_sync": 4, "block_size": 4}, 0.7)], ids=str
)
def test_logprobs_of_every_turn_are_those_of_one_forward_over_the_whole_string(
    decoder, settings, temperature
):
    samples = talked(engine_of(decoder, **settings), Talk(), temperature=temperature)
    assert sum(len(s.environment_spans) for s in samples) > 15
    for i, sample in enumerate(samples):
        truth_TV = packed_logprobs(decoder, prompts_of(*LENGTHS)[i // 3], sample, temperature)
        truth_T = truth_TV[sample.sampled_indices, torch.tensor(sample.tokens_T)[sample.sampled_indices]]
        assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-5)


def test_pages_are_continued_so_only_what_was_given_is_computed(decoder):
    """And of it all but the last token, which a decode step takes, but the last one of the turn before."""
    talk, engine = Talk(), engine_of(decoder)
    samples = talked(engine, talk)
    num_given = sum(len(places) for s in samples for places in s.environment_spans)
    assert engine.stats.prefill_tokens == sum(LENGTHS) + num_given
    assert engine.stats.num_preemptions == 0
    assert talk.rounds[0] == len(samples) and len(talk.rounds) == 3, "all who wait are answered together"


@pytest.fixture(scope="module")
def plain(decoder):
    """The samples of an engine with room for all."""
    return talked(engine_of(decoder), Talk())


@pytest.mark.parametrize(("num_pages", "page_tokens", "burst_steps"), [(28, 4, 1), (28, 4, 3), (110, 1, 3)])
def test_a_conversation_does_not_depend_on_the_pages_there_are(
    decoder, plain, num_pages, page_tokens, burst_steps
):
    talk = Talk()
    engine = engine_of(
        decoder,
        block_size=page_tokens,
        kv_cache_gb=kv_gb_for(decoder, num_pages, page_tokens),
        decode_steps_per_sync=burst_steps,
    )
    samples = talked(engine, talk)
    assert_same(samples, plain)
    assert [s.environment_spans for s in samples] == [s.environment_spans for s in plain]
    num_given = sum(len(places) for s in samples for places in s.environment_spans)
    assert engine.stats.prefill_tokens > sum(LENGTHS) + num_given, "nobody had to compute anything again"
    assert engine.stats.peak_pages <= num_pages


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 2}, {"exact": True}, {"max_num_batched_tokens": 3}], ids=str
)
def test_a_conversation_does_not_depend_on_the_engines_settings(decoder, plain, settings):
    assert_same(talked(engine_of(decoder, **settings), Talk()), plain)


@pytest.mark.parametrize("burst_steps", [1, 4])
def test_a_turn_ends_at_its_own_limit_and_the_sample_at_its(decoder, burst_steps):
    engine = engine_of(decoder, stop_token_ids=frozenset(), decode_steps_per_sync=burst_steps)
    talk = Talk(num_turns=100, turn_tokens=6)
    for sample in talked(engine, talk):
        assert MAX_TOKENS - 7 <= len(sample.tokens_T) <= MAX_TOKENS and sample.finish == "length"
    for turns in talk.turns.values():
        assert all(len(turn.tokens_T) == 6 for turn in turns[:-1]) and len(turns[-1].tokens_T) <= 6
        assert all(turn.finish == "length" for turn in turns)


def test_a_stop_string_counts_within_a_turn_and_not_across_what_was_given(decoder):
    class Half(Talk):
        def _one(self, turn):
            super()._one(turn)
            return (
                tokens_of("a")
                if len(self.turns[turn.index, turn.sample_index]) < 6 and turn.num_left > 1
                else None
            )

    talk = Half()
    engine = engine_of(decoder, stop_token_ids=frozenset({EOS}))
    talked(engine, talk, stop=("ab", "e", "T"))
    turns = [turn for each in talk.turns.values() for turn in each]
    stopped = [turn for turn in turns if turn.finish == "stop" and turn.tokens_T[-1] != EOS]
    assert len(stopped) > 10
    for turn in stopped:
        assert "ab" not in turn.text and "e" not in turn.text and "T" not in turn.text
    begun_b = [turn for turn in turns if turn.text.startswith("b")]
    assert all(len(turn.tokens_T) > 1 for turn in begun_b)


def test_in_exact_mode_scores_are_the_recorded_logprobs_bit_for_bit(decoder):
    engine, sampling = engine_of(decoder, exact=True), Sampling(max_tokens=MAX_TOKENS)
    groups = engine.generate(request_of(prompts_of(*LENGTHS), sampling=sampling), conversation=Talk())
    recorded = [x for group in groups for s in group.samples_G for x in s.logprobs_T]
    assert engine.score(groups, sampling=sampling).tolist() == recorded


class FakeTalk(FakeRunner):
    """Some of those who are done rest, and are given a token or let go once nobody can run."""

    def __init__(self, *args, rng, **settings):
        super().__init__(*args, **settings)
        self.rng, self.num_rests = rng, 0

    def draw(self, samples):
        for s in samples:
            s.tokens_T.append(0)
            if len(s.tokens_T) == s.group.max_tokens or self.rng.random() < 0.15:
                s.finish = "stop"
        self.scheduler.park([s for s in samples if s.finish])

    def turn(self):
        super().turn()
        if not self.scheduler.running and not any(
            s.finish is None for group in self.admissions for s in group.samples_G
        ):
            resting = list(self.scheduler.parked)
            over = [s for s in resting if len(s.tokens_T) > s.group.max_tokens - 2 or self.rng.random() < 0.3]
            self.finished += over
            self.scheduler.finish(over)
            going_on = [s for s in resting if s not in over]
            for s in going_on:
                s.tokens_T.append(0)
                s.finish = None
            self.num_rests += len(going_on)
            self.scheduler.resume(going_on)

    def check(self):
        scheduler = self.scheduler
        live = [s for group in self.admissions for s in group.samples_G if s not in self.finished]
        own = [page for s in live for page in s.pages[s.group.prompt_tokens // PAGE_TOKENS :]]
        prompts = [page for group in self.groups for page in group.pages]
        assert len(own) == len(set(own)) and not set(own) & set(prompts)
        assert self.pages.num_used == len(own) + len(prompts)
        order = [(s.group.index, s.sample_index) for s in scheduler.running]
        assert order == sorted(order)
        for s in scheduler.running:
            assert len(s.pages) >= num_pages(s.num_positions, PAGE_TOKENS)
        for s in live:
            if s.num_cached:
                assert s.pages and s.num_cached < s.num_positions


@pytest.mark.parametrize("seed", range(30))
def test_every_conversation_ends_with_as_few_pages_as_the_largest_needs(seed):
    rng = random.Random(seed)
    groups = [live_group(i, rng.randint(1, 14), rng.randint(1, 20), rng.randint(1, 5)) for i in range(8)]
    least = max(min_group_pages(g.prompt_tokens, g.max_tokens, PAGE_TOKENS) for g in groups)
    runner = FakeTalk(
        groups, total_pages=least + rng.choice((0, 1, 5, 20)), max_num_seqs=rng.randint(1, 12), rng=rng
    ).run()
    assert len(runner.finished) == sum(len(g.samples_G) for g in groups)
    assert runner.num_rests > 0


def test_the_pages_of_those_who_rest_are_room_for_those_who_run():
    group = live_group(0, PAGE_TOKENS, 20, 2)  # a page of prompt; a sample fills 5 more
    runner = FakeRunner([group], total_pages=7, max_num_seqs=2)
    first, second = group.samples_G
    scheduler = runner.scheduler
    scheduler.admit()
    runner.draw([first, second])
    scheduler.schedule()
    for _ in range(2 * PAGE_TOKENS):
        scheduler.allocate()
        runner.draw([first, second])
    scheduler.allocate()
    assert (
        runner.pages.num_free == 0 and scheduler.steps_without_preemption(PAGE_TOKENS + 1) <= PAGE_TOKENS // 2
    )
    scheduler.park([second])
    assert scheduler.steps_without_preemption(PAGE_TOKENS + 1) == PAGE_TOKENS + 1
    assert scheduler.allocate(PAGE_TOKENS + 1) == [first]
    assert second.pages == [] and second.num_cached == 0 and scheduler.num_preemptions == 0
