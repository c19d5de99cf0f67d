"""Runners, and with them what they have recorded, outlive calls with longer prompts than before."""

import itertools

import pytest

from engine.parts import drawn, engine_of, prompts_of
from models.tiny import tiny

MOST = 12  # tokens of a sample
LENGTHS = (5, 14, 18, 22, 30, 36, 40, 44)


@pytest.fixture(scope="module")
def decoder():
    return tiny()


def runners_of(engine):
    """The runner after each call of ever longer prompts, and all that was sampled."""
    found, samples = [], []
    for length in LENGTHS:
        samples.append(drawn(engine, prompts_of(length, 5), max_tokens=MOST))
        found.append(next(iter(engine._runners._runners.values())))
    return found, samples


def test_a_call_as_long_as_expected_keeps_cache_and_runner(decoder):
    engine = engine_of(decoder, block_size=1)
    engine.expect(max(LENGTHS) + MOST)
    (first, *others), samples = runners_of(engine)
    assert all(runner is first for runner in others)
    assert engine._cache is not None and engine._runners._max_pages == 64
    cache = engine._cache
    drawn(engine, prompts_of(max(LENGTHS), max(LENGTHS)), max_tokens=MOST)
    assert engine._cache is cache
    assert samples == runners_of(engine_of(decoder, block_size=1))[1]


def test_tables_grow_by_a_quarter_at_least_and_no_wider_than_the_models_sequences(decoder):
    engine = engine_of(decoder, block_size=1)
    cache = engine._runners
    widths = [0]
    for pages in range(1, decoder.max_positions + 1):
        if pages > widths[-1]:
            cache._max_pages = widths[-1]
            widths.append(cache._table_pages(pages))
    for before, wide in itertools.pairwise(widths):
        assert wide % 16 == 0 and wide >= min(int(1.25 * before), decoder.max_positions)
    assert widths[-1] - decoder.max_positions in range(16) and len(widths) < decoder.max_positions / 16
    engine.expect(10 * decoder.max_positions)
    cache._max_pages = 0
    assert cache._table_pages(3) == widths[-1]
