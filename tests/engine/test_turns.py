"""The KV cache and the learner use a GPU's memory in turns."""

import gc

import pytest
import torch

from alone import alone
from engine.decode.test_decode_kernels import NEVER, decoder_of, small_prompts
from engine.parts import drawn, engine_of
from qerl.engine.decode import runner_cache
from qerl.errors import UserError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (9, 31, 40, 130)
MIB = 1 << 20


@pytest.fixture(scope="module")
def decoder():
    return decoder_of()


def free_bytes():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@alone
def test_between_calls_the_cache_takes_no_memory_and_its_graphs_stay(decoder, limited):
    engine, prompts_P = engine_of(decoder, stop_token_ids=NEVER), small_prompts(*LENGTHS)
    before = drawn(engine, prompts_P, max_tokens=100)
    cache, (runner,) = engine._cache, engine._runners._runners.values()
    graphs = dict(runner._graphs)
    assert cache.num_bytes > 0 and cache.resident_bytes == 0 and graphs
    free = free_bytes()
    for _ in range(3):
        torch.full((2 << 30,), 1.0, device="cuda").sum().item()  # what learning writes where pages were
        assert drawn(engine, prompts_P, max_tokens=100) == before
        assert engine._cache is cache and runner._graphs == graphs and free_bytes() == free


def test_a_few_samples_in_the_graph_of_eight_are_those_of_their_own_graphs_bit_for_bit(decoder, monkeypatch):
    drawn_by_rows = []
    for rows in (8, 1):
        monkeypatch.setattr(runner_cache, "_SHARED_ROWS", rows)
        engine = engine_of(decoder, stop_token_ids=NEVER)
        drawn_by_rows.append(
            [drawn(engine, small_prompts(*LENGTHS[:n]), num_samples=1, max_tokens=40) for n in (1, 2, 3)]
        )
        (runner,) = engine._runners._runners.values()
        assert sorted(runner._graphs) == [8 if rows == 8 else 4]  # a larger cache drops the smaller ones
    assert drawn_by_rows[0] == drawn_by_rows[1]


@alone
def test_a_larger_call_takes_other_addresses_and_leaves_none_behind(decoder):
    engine = engine_of(decoder, stop_token_ids=NEVER)
    drawn(engine, small_prompts(*LENGTHS), max_tokens=900)
    small, free = engine.num_bytes, free_bytes()
    for lengths in (LENGTHS * 2, LENGTHS * 3):
        drawn(engine, small_prompts(*lengths), max_tokens=900)
    assert engine.num_bytes > 2.5 * small
    assert free - free_bytes() < 64 * MIB  # graphs of more rows, no pages
    del engine
    assert free_bytes() >= free


@alone
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_ends_a_call_gives_its_pages_back(decoder, error):
    engine, prompts_P = engine_of(decoder, stop_token_ids=NEVER), small_prompts(*LENGTHS)
    plain = drawn(engine, prompts_P, max_tokens=900)
    free = free_bytes()

    def fail(*_):
        raise error

    handle = decoder.norm.register_forward_hook(fail)
    try:
        with pytest.raises(error):
            drawn(engine, prompts_P, max_tokens=900)
    finally:
        handle.remove()
    assert free_bytes() >= free
    assert drawn(engine, prompts_P, max_tokens=900) == plain


def test_a_cache_made_when_there_was_more_room_is_made_anew(decoder, limited):
    engine, prompts_P = engine_of(decoder, stop_token_ids=NEVER), small_prompts(*LENGTHS)
    plain = drawn(engine, prompts_P, num_samples=30, max_tokens=4000)
    large = engine.num_bytes
    assert large > 512 * MIB
    limited(large // 2)
    tight = drawn(engine, prompts_P, num_samples=30, max_tokens=4000)
    assert 0 < engine.num_bytes < large / 2 and engine.stats.num_preemptions > 0
    assert [len(s.tokens_T) for s in tight] == [len(s.tokens_T) for s in plain]
    limited(MIB)
    with pytest.raises(UserError, match=r"pages of KV cache"):
        drawn(engine, prompts_P, num_samples=30, max_tokens=4000)
