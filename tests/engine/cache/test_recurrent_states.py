"""Samples of a model whose layers have recurrent states: the states follow their samples everywhere."""

import pytest
import torch

from engine.parts import EOS, branched, compared, drawn, engine_of, packed_logprobs, prompts_of
from engine.test_conversation import Talk, talked
from models.family_rows import load, oracle, save
from qerl.config import AdapterConfig, EngineConfig
from qerl.cost.cache import page_bytes, slot_bytes
from qerl.engine.cache.budget import working_bytes
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.cache.state_cache import StateCache
from qerl.errors import UserError
from qerl.models.peft.adapter import add_adapter

LENGTHS = (9, 31, 1, 20)
FEW = frozenset({EOS})  # samples get long
MAX_TOKENS = 24
_ROUNDING = 1e-3  # transformers in float64 differs from both by up to 2e-4


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load(save(oracle("Qwen3_5"), tmp_path_factory.mktemp("hybrid")))


def sampled(decoder, prompts_P=None, *, num_samples=3, max_tokens=MAX_TOKENS, **settings):
    engine = engine_of(decoder, stop_token_ids=FEW, **settings)
    prompts_P = prompts_of(*LENGTHS) if prompts_P is None else prompts_P
    return drawn(engine, prompts_P, num_samples=num_samples, max_tokens=max_tokens), engine.stats


@pytest.fixture(scope="module")
def plain(decoder):
    """Return the samples of an engine with room for all of LENGTHS."""
    return sampled(decoder)[0]


def assert_same(got, expected):
    assert [s.tokens_T for s in got] == [s.tokens_T for s in expected]
    assert [s.finish for s in got] == [s.finish for s in expected]
    for a, b in zip(got, expected, strict=True):
        assert a.logprobs_T == pytest.approx(b.logprobs_T, abs=_ROUNDING)


def gb_for(decoder, num_pages, num_slots, page_tokens):
    arch = decoder.architecture
    states = (num_slots + 1) * slot_bytes(arch, torch.float32)
    return (states + (num_pages + 0.5) * page_bytes(arch, page_tokens, torch.float32)) / 1e9


def test_logprobs_are_the_packed_forwards(decoder, plain):
    ours_T, packed_T, _ = compared(decoder, prompts_of(*LENGTHS), plain, 3)
    assert len(ours_T) > 200
    torch.testing.assert_close(ours_T, packed_T, atol=_ROUNDING, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 1, "block_size": 4},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"decode_steps_per_sync": 16, "block_size": 4, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_a_sample_does_not_depend_on_the_engines_settings(decoder, plain, settings):
    assert_same(sampled(decoder, **settings)[0], plain)


LONG = {"num_samples": 2, "max_tokens": 70}


@pytest.fixture(scope="module")
def long_samples(decoder):
    return sampled(decoder, prompts_of(31, 20), **LONG)[0]


@pytest.mark.parametrize("burst_steps", [1, 5])
def test_a_sample_does_not_depend_on_pauses(decoder, long_samples, burst_steps):
    prompts_P = prompts_of(31, 20)
    got, stats = sampled(
        decoder,
        prompts_P,
        block_size=1,
        max_num_seqs=3,
        kv_cache_gb=gb_for(decoder, 176, 5, 1),
        max_num_batched_tokens=11,
        decode_steps_per_sync=burst_steps,
        **LONG,
    )
    assert_same(got, long_samples)
    assert stats.num_preemptions > 0 and stats.prefill_tokens > 51


def test_fewer_slots_run_fewer_samples_and_change_none(decoder, plain):
    got, stats = sampled(decoder, kv_cache_gb=gb_for(decoder, 9, 4, 16))
    assert_same(got, plain)
    roomy = sampled(decoder)[1]
    assert stats.decode_forwards > 2 * roomy.decode_forwards and stats.num_preemptions == 0


def test_a_cache_too_small_for_two_slots_says_how_much_would_do(decoder):
    prompts_P = prompts_of(*LENGTHS)
    with pytest.raises(UserError, match=r"raise it to (\S+) or more") as error:
        sampled(decoder, prompts_P, kv_cache_gb=gb_for(decoder, 1, 2, 16))
    enough = float(str(error.value).split("raise it to ")[1].split()[0])
    assert len(sampled(decoder, prompts_P, kv_cache_gb=enough)[0]) == 12


def test_a_sample_does_not_depend_on_its_batch(decoder, plain):
    alone = [s for prompt in prompts_of(*LENGTHS) for s in sampled(decoder, [prompt])[0]]
    assert_same(alone, plain)


def test_samples_that_share_a_prompt_are_those_of_a_prompt_each(decoder, plain):
    singles = sampled(decoder, num_samples=1)[0]
    assert_same(plain[::3], singles)


def test_a_second_call_starts_from_nothing_that_the_first_left(decoder, plain):
    engine = engine_of(decoder, stop_token_ids=FEW, kv_cache_gb=0.01)
    for _ in range(2):
        got = drawn(engine, prompts_of(*LENGTHS), max_tokens=MAX_TOKENS)
    assert_same(got, plain)


@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "decode_steps_per_sync": 4}], ids=str)
def test_branches_go_on_from_their_pivots(decoder, settings):
    engine = engine_of(decoder, stop_token_ids=FEW, **settings)
    _, branches, found, _ = branched(engine, prompts_of(*LENGTHS), temperature=0.7)
    for group, (parents, pivot) in zip(branches, found, strict=True):
        parent = parents.samples_G[pivot.sample_index]
        for sample in group.samples_G:
            assert sample.tokens_T[: pivot.prefix_tokens] == parent.tokens_T[: pivot.prefix_tokens]
            truth_TV = packed_logprobs(decoder, group.prompt, sample, 0.7)
            truth_T = truth_TV[torch.arange(len(sample.tokens_T)), torch.tensor(sample.tokens_T)]
            assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=_ROUNDING)
    again = sum(pivot.prefix_tokens - 1 for _, pivot in found)
    assert engine.stats.prefill_tokens == sum(LENGTHS) + again, "once for each pivot, not for each branch"
    assert engine.stats.reused_tokens == sum(len(group.prompt.tokens_T) for group, _ in found)


def test_branches_come_in_batches_that_leave_a_slot(decoder):
    whole = branched(engine_of(decoder, stop_token_ids=FEW), prompts_of(*LENGTHS))
    few = branched(
        engine_of(decoder, stop_token_ids=FEW, kv_cache_gb=gb_for(decoder, 26, 3, 16)), prompts_of(*LENGTHS)
    )
    assert few[3] > whole[3] == 1
    for got, want in zip(few[1], whole[1], strict=True):
        assert_same(got.samples_G, want.samples_G)


@pytest.mark.parametrize(
    "settings",
    [{"block_size": 4}, {"max_num_seqs": 3, "decode_steps_per_sync": 3}],
    ids=str,
)
def test_a_parked_sample_goes_on_where_its_turn_ended(decoder, settings):
    """Turns that the host ends at a stop string too: the device has then computed tokens past the end."""
    engine, prompts_P = engine_of(decoder, **settings), prompts_of(*LENGTHS)
    samples = talked(engine, Talk(), prompts_P, stop=("a", "cd"))
    assert sum(len(s.environment_spans) for s in samples) > 10
    for i, sample in enumerate(samples):
        truth_TV = packed_logprobs(decoder, prompts_P[i // 3], sample)
        at = sample.sampled_indices
        truth_T = truth_TV[at, torch.tensor(sample.tokens_T)[at]]
        assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=_ROUNDING)


def test_states_are_counted_with_the_cache(decoder):
    arch, cpu = decoder.architecture, torch.device("cpu")
    states = StateCache(arch, 3, torch.float32, cpu)
    cache = KVCache(arch, 5, 4, torch.float32, cpu, states)
    each = 3 * (3 * 80 * 4 + 4 * 8 * 12 * 4)  # three layers: W - 1 rows of q | k | v, and [N, H, V]
    assert slot_bytes(arch, torch.float32) == each and states.num_bytes == 4 * each
    assert page_bytes(arch, 4, torch.float32) == 2 * 1 * 4 * 2 * 16 * 4, "one layer of four has pages"
    assert cache.num_bytes == 4 * each + 6 * page_bytes(arch, 4, torch.float32)


def test_a_prefill_needs_memory_for_its_chunks(decoder):
    few, many = (working_bytes(EngineConfig(max_num_batched_tokens=n), decoder) for n in (10, 1010))
    row = 2 * (4 * 80 + 10 * 48 + 2 * (6 + 2 * 2) * 16) + 4 * 4 * (8 * 8 + 6 * 12 + 4 * 64)
    assert many - few == 1000 * row


def test_published_adapters_of_the_delta_layers_are_sampled_with(tmp_path):
    decoder = load(save(oracle("Qwen3Next"), tmp_path))
    add_adapter(decoder, AdapterConfig(rank=4, target_modules=("in_proj_qkvz", "in_proj_ba", "out_proj")), 0)
    engine, prompts_P = engine_of(decoder, stop_token_ids=FEW), prompts_of(9, 20)
    before = drawn(engine, prompts_P)
    for _, linear in decoder.linears():
        if linear.lora_B is not None:
            linear.lora_B.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    engine.publish(1)
    after = drawn(engine, prompts_P)
    assert before[0].logprobs_T != after[0].logprobs_T
    for i, sample in enumerate(after):
        truth_TV = packed_logprobs(decoder, prompts_P[i // 3], sample)
        truth_T = truth_TV[torch.arange(len(sample.tokens_T)), torch.tensor(sample.tokens_T)]
        assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=_ROUNDING)
