"""Samples that go on with what the cache of an earlier call held of them (carried_cache.py)."""

import gc
import itertools
import math

import pytest
import torch

from engine.decode.test_decode_hybrid_gpu import ARCHITECTURES
from engine.decode.test_decode_kernels import SMALL, decoder_of
from engine.parts import EOS, engine_of, prompts_of
from engine.schedule.test_window_pages import ALL, MIXED, windowed
from models.family_rows import load, oracle, save
from models.tiny import forest, tiny
from qerl.cost.cache import page_bytes
from qerl.engine.schedule import carried_cache
from qerl.kernels.attention.tree_attention import TreeLayout, tree_attention
from qerl.types import Sampling, UnfinishedGroup, UnfinishedSample

LENGTHS, SAMPLES = (9, 16, 1), 3
NUM_SAMPLES = len(LENGTHS) * SAMPLES
SAMPLING = Sampling(max_tokens=30, temperature=1.0)

DECODERS = {
    "whole": lambda folder: tiny(),
    "some windows": lambda folder: windowed(MIXED),
    "windows": lambda folder: windowed(ALL),
    "states": lambda folder: load(save(oracle("Qwen3_5"), folder)),
    "two kinds of heads": lambda folder: load(save(oracle("Gemma4", sliding_window=256), folder)),
    "mixture": lambda folder: load(save(oracle("Qwen3Moe"), folder)),
}


def begun():
    fresh = [UnfinishedSample()] * SAMPLES
    return [UnfinishedGroup(prompt=p, seed_step=4, samples_G=fresh) for p in prompts_of(*LENGTHS)]


def begun_engine(decoder, **settings):
    given = {"max_num_seqs": NUM_SAMPLES, "decode_steps_per_sync": 4} | settings
    return engine_of(decoder, stop_token_ids=frozenset({EOS}), **given)


def continued(engine, groups, *, num_bursts: int | None = 2, carries_cache=True):
    """Sample until some bursts have been read; None: to the end."""
    left = [math.inf if num_bursts is None else num_bursts]

    def is_enough(complete_P):
        left[0] -= 1
        return left[0] < 0

    return engine.continue_groups(
        groups, is_enough=is_enough, sampling=SAMPLING, seed=3, carries_cache=carries_cache
    )


def sampled(engine, num_calls=4, *, num_bursts=2, carries_cache=True, between=lambda call: None):
    """Sample in calls, all but the last of which end after some bursts; return [(groups, stats)] of each.
    A group is (begun, whole or None)."""
    found, groups = [], [(each, None) for each in begun()]
    for call in range(num_calls):
        is_last = call == num_calls - 1
        groups = continued(
            engine,
            [each for each, _ in groups],
            num_bursts=None if is_last else num_bursts,
            carries_cache=carries_cache and not is_last,
        )
        found.append((groups, engine.stats))
        between(call)
    return found


def samples_of(found):
    return [s for _, whole in found[-1][0] for s in whole.samples_G]


def assert_same(ours, theirs, atol=1e-3):
    assert [(s.tokens_T, s.finish, s.routes) for s in ours] == [
        (s.tokens_T, s.finish, s.routes) for s in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs_T == pytest.approx(b.logprobs_T, abs=atol)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """decoder(kind)"""
    kept = {}

    def decoder(kind):
        if kind not in kept:
            kept[kind] = DECODERS[kind](tmp_path_factory.mktemp("decoder"))
        return kept[kind]

    return decoder


@pytest.fixture
def small_pieces(monkeypatch):
    """No span fits in one piece, and tensors begin within one."""
    monkeypatch.setattr(carried_cache, "_PIECE_BYTES", 1000)


def overwrite(engine):
    """Fill the cache's memory with something else."""
    cache = engine._cache
    states = [] if cache.states is None else [cache.states.conv, cache.states.state]
    for x in itertools.chain(*(kind.tensors for kind in cache._kinds), states):
        x.fill_(0 if x.dtype == torch.uint8 else 3.0)


@pytest.mark.parametrize("page_tokens", [4, 16])
@pytest.mark.parametrize("kind", DECODERS)
def test_no_position_is_computed_twice_and_samples_are_the_same(made, kind, page_tokens, small_pieces):
    decoder = made(kind)
    engine = begun_engine(decoder, block_size=page_tokens)
    ours = sampled(engine, between=lambda call: overwrite(engine))
    whole = sampled(begun_engine(decoder, block_size=page_tokens), num_calls=1)
    assert_same(samples_of(ours), samples_of(whole))
    assert [stats.prefill_tokens for _, stats in ours] == [sum(LENGTHS), 0, 0, 0]
    for (before, _), (_, stats) in itertools.pairwise(ours):
        unfinished = [each for each, whole in before if whole is None]
        positions = sum(len(each.prompt.tokens_T) for each in unfinished)
        positions += sum(len(s.tokens_T) - 1 for each in unfinished for s in each.samples_G if not s.finish)
        assert stats.reused_tokens == positions > 0
    again = sampled(begun_engine(decoder, block_size=page_tokens), carries_cache=False)
    assert_same(samples_of(again), samples_of(whole))
    assert all(stats.prefill_tokens > 0 == stats.reused_tokens for _, stats in again[1:])


def test_fp8_keys_and_values_come_back_as_they_were(made):
    """Exactly: what the prefill writes differs from what steps do, by rounding."""
    decoder = made("whole")
    ours = sampled(begun_engine(decoder, kv_cache_dtype="fp8"))
    whole = sampled(begun_engine(decoder, kv_cache_dtype="fp8"), num_calls=1)
    assert_same(samples_of(ours), samples_of(whole), atol=1e-6)


@pytest.mark.parametrize("kind", ["whole", "some windows", "states"])
def test_samples_that_wait_or_are_preempted_are_the_same(made, kind):
    """With rows for four of nine samples, or pages for fewer, some wait for calls with what was carried."""
    decoder = made(kind)
    whole = samples_of(sampled(begun_engine(decoder, block_size=4), num_calls=1))
    few = sampled(begun_engine(decoder, block_size=4, max_num_seqs=4), 8, num_bursts=1)
    assert_same(samples_of(few), whole)
    if kind == "whole":
        kv_gb = 30.5 * page_bytes(decoder.architecture, 4, torch.float32) / 1e9
        scarce = sampled(begun_engine(decoder, block_size=4, kv_cache_gb=kv_gb), 8, num_bursts=1)
        assert_same(samples_of(scarce), whole)
        assert sum(stats.num_preemptions for _, stats in scarce) > 0 < sum(s.reused_tokens for _, s in scarce)


def test_keys_and_values_are_those_of_the_weights_that_sampled_the_tokens():
    """Against one forward of the new weights in which the first keys and values are the old weights'."""
    decoder = tiny()
    norms = {name: x for name, x in decoder.named_buffers() if "norm" in name and not name.endswith("noise")}
    old = {name: x.clone() for name, x in norms.items()}

    def use(factor):
        for name, x in norms.items():
            x.copy_(old[name] * factor)

    found = sampled(begun_engine(decoder), 2, between=lambda call: use(1.25))
    num_checked = 0
    for (before, _), (_, whole) in zip(found[0][0], found[1][0], strict=True):
        for first, s in zip(before.samples_G, whole.samples_G, strict=True):
            if first.finish is not None:
                continue
            tokens_T = torch.tensor([*before.prompt.tokens_T, *s.tokens_T])
            num_old = len(before.prompt.tokens_T) + len(first.tokens_T) - 1
            use(1)
            keys, _ = mixed_forward(decoder, tokens_T, {}, num_old)
            use(1.25)
            _, logprobs_TV = mixed_forward(decoder, tokens_T, keys, num_old)
            _, plain_TV = mixed_forward(decoder, tokens_T, {}, num_old)
            later = range(num_old, len(tokens_T) - 1)
            expected = [logprobs_TV[t, tokens_T[t + 1]].item() for t in later]
            plain = [plain_TV[t, tokens_T[t + 1]].item() for t in later]
            assert s.logprobs_T[-len(expected) :] == pytest.approx(expected, abs=1e-4)
            assert s.logprobs_T[-len(expected) :] != pytest.approx(plain, abs=1e-3)
            num_checked += 1
    assert num_checked > 3


def mixed_forward(decoder, tokens_T, old_keys, num_old):
    """Return ({layer: (k, v)}, logprobs); the first num_old keys and values of a layer are old_keys'."""
    layout, seen = TreeLayout.of(forest((len(tokens_T), ())), "cpu"), {}

    def attend(layer_index, q_TNH, k_TKH, v_TKH, options):
        seen[layer_index] = k_TKH, v_TKH
        if layer_index in old_keys:
            k_TKH, v_TKH = (
                torch.cat([old[:num_old], x[num_old:]])
                for old, x in zip(old_keys[layer_index], (k_TKH, v_TKH), strict=True)
            )
        return tree_attention(q_TNH, k_TKH, v_TKH, layout, options)

    hidden_TD = decoder(tokens_T, torch.arange(len(tokens_T)), attend)
    return seen, decoder.logits(hidden_TD).log_softmax(-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.parametrize("architecture", [SMALL, ARCHITECTURES["by head"]], ids=["whole", "states"])
def test_every_bit_comes_back_to_a_gpu(architecture, kv):
    """The memory of the cache is given back between the calls, and filled with something else."""
    decoder = decoder_of(architecture=architecture)

    def use_memory(call):
        torch.full((1 << 28,), float("nan"), device="cuda")

    engine = begun_engine(decoder, kv_cache_dtype=kv)
    ours = sampled(engine, between=use_memory)
    assert_same(samples_of(ours), samples_of(sampled(engine, num_calls=1)), atol=0)
    assert all(stats.reused_tokens > 0 == stats.prefill_tokens for _, stats in ours[1:])


def test_what_never_runs_in_a_call_keeps_its_cache(made):
    """Two rows: samples of the first group wait, and the others are not even admitted."""
    groups = [each for each, _ in continued(begun_engine(made("whole")), begun())]
    engine = begun_engine(made("whole"), max_num_seqs=2)
    left = [each for each, _ in continued(engine, groups, num_bursts=1) if not each.is_complete]
    assert len(left) == len(LENGTHS) and all(each.cache is not None for each in left)
    assert all((s.cache is None) == (s.finish is not None) for each in left for s in each.samples_G)
    assert engine.stats.prefill_tokens == 0
    left = [each for each, _ in continued(engine, left, num_bursts=1, carries_cache=False)]
    assert not any(each.cache_bytes for each in left), "nothing is carried where it is not asked for"


@pytest.mark.parametrize("forgets", [False, True])
def test_host_memory_is_used_again(made, forgets):
    """Also that of caches which are forgotten, and not only when Python looks for cycles of references."""
    engine, most = begun_engine(made("whole")), 0
    groups = begun()
    gc.disable()
    try:
        for _ in range(4):
            groups = [each for each, _ in continued(engine, groups)]
            most = max(most, sum(each.cache_bytes for each in groups))
            if forgets:
                groups = [each.without_cache() for each in groups]
    finally:
        gc.enable()
    assert engine._cache is not None and engine._cache._host.num_made * 2**21 == most > 0


def test_what_the_host_has_no_memory_for_is_computed_again(made, monkeypatch):
    """Here for all but two of the groups and samples."""
    monkeypatch.setattr(carried_cache, "usable_host_bytes", lambda: 2.5 * 2**21)
    engine = begun_engine(made("whole"))
    groups = [each for each, _ in continued(engine, begun())]
    assert sum(each.cache_bytes for each in groups) == 2 * 2**21
    whole = continued(engine, groups, num_bursts=None)
    assert engine.stats.prefill_tokens > 0 < engine.stats.reused_tokens
    assert_same(samples_of([(whole, None)]), samples_of(sampled(engine, num_calls=1)))


def test_a_sample_is_computed_again_with_its_prompt(made, monkeypatch):
    """It shares the prompt's pages, which are then those of other weights."""
    allocate, asked = carried_cache.HostPieces.allocate, []

    def all_but_the_first(self, num_bytes):
        asked.append(num_bytes)
        return allocate(self, num_bytes) if len(asked) > 1 else None

    monkeypatch.setattr(carried_cache.HostPieces, "allocate", all_but_the_first)
    first, *others = [each for each, _ in continued(begun_engine(made("whole")), begun())]
    assert first.cache_bytes == 0 < min(each.cache_bytes for each in others)


def test_what_samples_have_from_an_earlier_call_is_dropped_with_their_prompts(made, monkeypatch):
    """Here of all that wait for a row when the host has no memory left."""
    decoder = made("whole")
    groups = [each for each, _ in continued(begun_engine(decoder), begun())]
    assert all(s.cache for each in groups for s in each.samples_G if not s.finish)
    engine = begun_engine(decoder, max_num_seqs=4)
    monkeypatch.setattr(carried_cache.HostPieces, "allocate", lambda *given: None)
    groups = [each for each, _ in continued(engine, groups, num_bursts=1) if not each.is_complete]
    begun_again = [each for each in groups if each.cache is None]
    assert begun_again and not any(s.cache for each in begun_again for s in each.samples_G)


def test_a_cache_is_restored_once(made):
    engine = begun_engine(made("whole"))
    groups = [each for each, _ in continued(engine, begun())]
    continued(engine, groups)
    with pytest.raises(AssertionError, match="restored before"):
        continued(engine, groups)


def test_a_group_without_its_cache_is_the_same_group(made):
    carried = [each for each, _ in continued(begun_engine(made("whole")), begun()) if not each.is_complete]
    assert carried and all(each.cache_bytes > 0 for each in carried)
    assert carried == [each.without_cache() for each in carried]
    assert not any(each.without_cache().cache_bytes for each in carried)
