import dataclasses

import pytest
import torch

from engine.parts import compared, drawn, engine_of, prompts_of
from models.tiny import tiny
from qerl.config import EngineConfig
from qerl.cost.cache import FP8, page_bytes
from qerl.engine.cache import budget as kv_budget
from qerl.engine.cache.budget import new_cache_bytes, working_bytes
from qerl.engine.cache.kv_cache import KVCache
from qerl.errors import UserError
from qerl.models.adapter_bank import AdapterBank


def test_a_cpu_has_a_gigabyte_unless_told_otherwise():
    decoder = tiny()
    for resident_bytes in (0, 700_000_000):
        assert new_cache_bytes(EngineConfig(), decoder, resident_bytes) == 1e9
        assert new_cache_bytes(EngineConfig(kv_cache_gb=0.25), decoder, resident_bytes) == 0.25e9


@pytest.mark.parametrize(("gives_back", "limit"), [(True, 900), (False, 600)])
def test_a_gpus_cache_leaves_the_rest_to_learning_only_if_it_stays(monkeypatch, gives_back, limit):
    """On a device with 1,000 bytes free beside a prefill's. One that stays must not raise its own limit."""
    decoder, config = tiny(), EngineConfig(max_num_batched_tokens=1)
    decoder.device = torch.device("cuda")
    monkeypatch.setattr(kv_budget, "can_give_back", lambda device: gives_back)
    free, held = working_bytes(config, decoder) + 1000, 0.0
    for _ in range(5):
        monkeypatch.setattr(kv_budget, "free_bytes", lambda device, held=held: free - held)
        size = new_cache_bytes(config, decoder, int(held))
        assert size == pytest.approx(limit)
        held = 0.0 if gives_back else size


@pytest.mark.parametrize("place", ["adapter_bank", "reserved_bank"])
def test_a_gpus_cache_leaves_the_memory_of_adapters_by_row(place, monkeypatch):
    """Three slots of rank 32, and A and B of two adapters of rank 20 twice, in fp32."""
    decoder, config = tiny(), EngineConfig(max_num_batched_tokens=1)
    setattr(decoder, place, AdapterBank(torch.float32, torch.device("cpu"), max_adapters=2, max_rank=20))
    widths = sum(linear.in_width + linear.out_width for _, linear in decoder.linears())
    decoder.device = torch.device("cuda")
    monkeypatch.setattr(kv_budget, "can_give_back", lambda device: True)
    by_row = 4 * widths * (3 * 32 + 2 * 2 * 20)
    free = working_bytes(config, decoder) + 1000 + by_row
    monkeypatch.setattr(kv_budget, "free_bytes", lambda device: free)
    assert new_cache_bytes(config, decoder, 0) == pytest.approx(900)


def test_a_cache_as_large_as_memory_allows_is_replaced_only_by_one_worth_its_graphs(monkeypatch):
    decoder = tiny()
    engine, prompts_P = engine_of(decoder, block_size=4, stop_token_ids=frozenset()), prompts_of(*[9] * 8)
    sizes = []
    for affordable, room in ((40, 45), (39, 40), (44, 49), (45, 50), (36, 44), (36, 45)):
        for name, pages in (("new_cache_bytes", affordable), ("max_cache_bytes", room)):
            limit = (pages + 0.5) * engine._size.page_bytes
            monkeypatch.setattr(f"qerl.engine.paged_engine.{name}", lambda *_, limit=limit: limit)
        drawn(engine, prompts_P, max_tokens=9)
        sizes.append(engine._cache.num_pages)
    assert sizes == [40, 40, 40, 45, 36, 36]
    drawn(engine, prompts_P[:1], num_samples=1, max_tokens=9)
    assert engine._cache.num_pages == 36


def test_a_cache_that_stays_is_memory_that_its_successor_may_have(monkeypatch):
    engine, held = engine_of(tiny()), []

    def new_cache_bytes(config, decoder, resident_bytes):
        held.append(resident_bytes)
        return 1e9

    monkeypatch.setattr("qerl.engine.paged_engine.new_cache_bytes", new_cache_bytes)
    for _ in range(2):
        drawn(engine, prompts_of(9))
    assert held == [0, engine.num_bytes] and engine.num_bytes > 0


def test_working_memory_grows_with_the_rows_of_a_prefill():
    decoder = tiny()
    a, row = decoder.architecture, 2 * (4 * 80 + 10 * 48 + 2 * (6 + 2 * 2) * 16)
    few, many = (working_bytes(EngineConfig(max_num_batched_tokens=n), decoder) for n in (10, 1010))
    assert many - few == 1000 * row and few == 10 * row + 4 * 80 * 48 + 64 * 4 * a.vocab_size + (20 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_a_cache_takes_the_bytes_of_its_pages_and_of_one_more(dtype):
    a = tiny().architecture
    cache = KVCache(a, 5, 4, dtype, torch.device("cpu"))
    assert cache.num_bytes == 6 * page_bytes(a, 4, dtype)
    assert page_bytes(a, 4, dtype) == 2 * 3 * 4 * 2 * (16 * dtype.itemsize + 4 * (dtype == FP8))


def test_what_a_cache_gives_back_is_what_later_reads_find():
    cache = KVCache(tiny().architecture, 5, 4, FP8, torch.device("cpu"))
    rng = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(3, 2, 16, generator=rng) * torch.tensor([1e-3, 1.0, 100.0])[:, None, None] for _ in "kv"
    )
    slots = torch.tensor([7, 2, 19])
    kept_k, kept_v = cache.pages.write(1, slots, k, v)
    assert ((kept_k - k).abs() <= k.abs() / 16 + k.abs().amax(-1, keepdim=True) / 448).all()
    assert not torch.equal(kept_k, k)
    again_k, again_v = cache.pages.rows(1, slots, torch.float32)
    assert torch.equal(again_k, kept_k) and torch.equal(again_v, kept_v)
    assert not cache.pages.rows(0, slots, torch.float32)[0].any()
    pages, _, tables = cache.pages.readable(1, torch.tensor([[4, 0], [1, 1]]), torch.float32)
    assert torch.equal(pages[tables[0, 0], 3], kept_k[2]) and torch.equal(pages[tables[1, 1], 3], kept_k[0])
    assert torch.equal(pages[tables[0, 1], 2], kept_k[1])


def test_copied_pages_keep_their_scales():
    cache = KVCache(tiny().architecture, 5, 4, FP8, torch.device("cpu"))
    k = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)) * 50
    cache.pages.write(2, torch.arange(4, 8), k, k)
    cache.pages.copy_pages([(1, 3)])
    sources, targets = (
        cache.pages.rows(2, torch.arange(start, start + 4), torch.float32)[0] for start in (4, 12)
    )
    assert torch.equal(sources, targets) and sources.any()


@pytest.mark.parametrize("burst_steps", [1, 4])
def test_fp8_keys_and_values_change_the_policy_a_little(burst_steps):
    decoder, prompts_P = tiny(), prompts_of(9, 31, 40)
    settings = {"block_size": 4, "max_num_batched_tokens": 13, "stop_token_ids": frozenset()}
    samples = drawn(
        engine_of(decoder, kv_cache_dtype="fp8", decode_steps_per_sync=burst_steps, **settings), prompts_P
    )
    engine, packed, exact = compared(decoder, prompts_P, samples, 3)
    assert torch.equal(packed, exact)
    assert 1e-4 < (engine - exact).abs().mean() < 0.1


def test_fp8_samples_do_not_depend_on_how_a_prefill_is_cut():
    decoder, prompts_P = tiny(), prompts_of(9, 31, 40)
    whole, cut = (
        drawn(
            engine_of(decoder, kv_cache_dtype="fp8", block_size=4, max_num_batched_tokens=tokens), prompts_P
        )
        for tokens in (2048, 7)
    )
    assert [s.tokens_T for s in whole] == [s.tokens_T for s in cut]


def test_a_config_of_no_memory_is_refused():
    with pytest.raises(UserError, match=r"engine\.kv_cache_gb must be positive"):
        EngineConfig(kv_cache_gb=0.0)
    with pytest.raises(UserError, match=r"engine\.decode_steps_per_sync must be positive"):
        dataclasses.replace(EngineConfig(), decode_steps_per_sync=0)
