"""The token callback sees every token when it is read, and can end samples."""

import collections

import pytest

from engine.parts import drawn, engine_of, prompts_of, request_of
from models.tiny import tiny


@pytest.fixture(scope="module")
def decoder():
    return tiny()


@pytest.mark.parametrize("burst_steps", [1, 4])
def test_a_watch_sees_every_token_as_it_is_read_and_each_sample_at_its_end(decoder, burst_steps):
    engine = engine_of(decoder, decode_steps_per_sync=burst_steps)
    prompts_P = prompts_of(5, 9)
    seen, ended = collections.defaultdict(list), {}

    def callback(index, sample_index, token, sample):
        assert (index, sample_index) not in ended
        seen[index, sample_index].append(token)
        if sample is not None:
            ended[index, sample_index] = sample
        return False

    observed = _generated(engine, prompts_P, on_token=callback)
    assert observed == _generated(engine, prompts_P)
    places = {(p, g): sample for p, group in enumerate(observed) for g, sample in enumerate(group.samples_G)}
    assert ended == places and seen == {place: s.tokens_T for place, s in places.items()}


@pytest.mark.parametrize("burst_steps", [1, 4])
def test_a_watch_ends_one_sample_and_leaves_the_others_as_they_are(decoder, burst_steps):
    engine = engine_of(decoder, decode_steps_per_sync=burst_steps, stop_token_ids=frozenset())
    prompts_P = prompts_of(5, 9)
    counts, ends = collections.Counter(), {(0, 1): 1, (1, 0): 3, (1, 2): 12}

    def callback(index, sample_index, token, sample):
        counts[index, sample_index] += 1
        return counts[index, sample_index] == ends.get((index, sample_index))

    whole, cut = _generated(engine, prompts_P), _generated(engine, prompts_P, on_token=callback)
    for p, (group, before) in enumerate(zip(cut, whole, strict=True)):
        for g, (sample, uncut) in enumerate(zip(group.samples_G, before.samples_G, strict=True)):
            num_tokens = ends.get((p, g), 12)
            assert sample.tokens_T == uncut.tokens_T[:num_tokens]
            assert sample.finish == ("length" if num_tokens == 12 else "stop")


def test_runners_of_more_samplings_than_are_kept_are_dropped_oldest_first(decoder):
    engine = engine_of(decoder)
    temperatures = [0.5 + i / 100 for i in range(12)]
    texts = [[s.text for s in drawn(engine, prompts_of(5), temperature=t)] for t in temperatures]
    kept = [key.temperature for key, _ in engine._runners._runners]
    assert kept == temperatures[4:]
    assert [s.text for s in drawn(engine, prompts_of(5), temperature=0.5)] == texts[0]


def _generated(engine, prompts_P, **watching):
    return engine.generate(request_of(prompts_P), **watching)
