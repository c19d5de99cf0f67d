"""The engine with heads of keys and values that differ by layer, as in Gemma 4."""

import pytest
import torch

from engine.parts import compared, drawn, engine_of, prompts_of
from models.family_rows import adapted, load, oracle, save
from parity.test_exact import gap, groups_of
from qerl.cost.cache import page_bytes
from qerl.engine.cache.kv_cache import KVCache
from qerl.models.architecture import KVHeads

LENGTHS = (9, 31, 1)
WHOLE = {"sliding_window": 256}  # as long as the longest text: no layer has a window


@pytest.fixture(scope="module", params=[{}, WHOLE], ids=["windows", "no windows"])
def decoder(request, tmp_path_factory):
    made = adapted(load(save(oracle("Gemma4", **request.param), tmp_path_factory.mktemp("gemma4"))))
    assert made.architecture.each_kv_heads == (KVHeads(2, 16), KVHeads(1, 24)) * 2
    return made


@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "max_num_batched_tokens": 7}], ids=str)
def test_logprobs_are_the_packed_forwards(decoder, settings):
    prompts_P = prompts_of(*LENGTHS)
    samples = drawn(engine_of(decoder, **settings), prompts_P, num_samples=3, max_tokens=24)
    ours_T, packed_T, _ = compared(decoder, prompts_P, samples, 3)
    assert len(ours_T) > 30
    torch.testing.assert_close(ours_T, packed_T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", [{"block_size": 4}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_in_exact_mode_scores_are_what_was_recorded_to_the_bit(decoder, settings):
    engine = engine_of(decoder, exact=True, max_num_seqs=16, **settings)
    assert gap(engine, groups_of(engine, LENGTHS)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_page_counts_the_heads_of_each_layer(decoder, dtype):
    a = decoder.architecture
    cache = KVCache(a, 5, 4, dtype, torch.device("cpu"))
    by_hand = (
        2
        * 4
        * 2
        * sum(n * (size * dtype.itemsize + 4 * (dtype.itemsize == 1)) for n, size in ((2, 16), (1, 24)))
    )
    assert page_bytes(a, 4, dtype) == by_hand and cache.num_bytes == 6 * by_hand
