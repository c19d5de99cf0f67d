import re
from dataclasses import replace

import pytest
import torch

from engine.parts import STOPS, compared, drawn, engine_of, packed_logprobs, prompts_of, tokenizer
from learner.tiny import VOCAB, tiny_decoder
from models.tiny import FAMILIES, forest, packed, tiny
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig
from qerl.cost.cache import page_bytes
from qerl.engine.decode.kernel_forward import NO_KERNELS, KernelForward
from qerl.engine.decode.runner import DecodeRunner
from qerl.errors import UserError
from qerl.models.peft.adapter import adapter_tensors, add_adapter

LENGTHS = (9, 31, 1, 16, 17, 15, 40)


@pytest.fixture(scope="module")
def decoder():
    return tiny()


@pytest.fixture(scope="module")
def plain(decoder):
    """Return the samples of an engine with room for all of LENGTHS."""
    return drawn(engine_of(decoder), prompts_of(*LENGTHS))


def assert_same(got, expected):
    assert [s.tokens_T for s in got] == [s.tokens_T for s in expected]
    assert [s.finish for s in got] == [s.finish for s in expected]
    for a, b in zip(got, expected, strict=True):
        assert a.logprobs_T == pytest.approx(b.logprobs_T, abs=1e-5)


def kv_gb_for(decoder, num_pages, page_tokens):
    return (num_pages + 0.5) * page_bytes(decoder.architecture, page_tokens, torch.float32) / 1e9


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_packed_forwards_arg_max(family):
    decoder, prompts_P = tiny(family), prompts_of(*LENGTHS)
    samples = drawn(engine_of(decoder), prompts_P, num_samples=1, temperature=0.0, max_tokens=20)
    for prompt, sample in zip(prompts_P, samples, strict=True):
        truth_TV = packed_logprobs(decoder, prompt, sample)
        assert sample.tokens_T == truth_TV.argmax(-1).tolist()
        assert sample.logprobs_T == pytest.approx(truth_TV.amax(-1).tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_packed_forwards(decoder, temperature):
    prompts_P = prompts_of(*LENGTHS)
    samples = drawn(engine_of(decoder, block_size=4), prompts_P, num_samples=2, temperature=temperature)
    for i, sample in enumerate(samples):
        truth_TV = packed_logprobs(decoder, prompts_P[i // 2], sample, temperature)
        truth_T = truth_TV[torch.arange(len(sample.tokens_T)), torch.tensor(sample.tokens_T)]
        assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-5)


def test_the_noise_in_the_norms_is_the_sampling_policys(decoder, plain):
    prompts_P = prompts_of(*LENGTHS)
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=1):
        samples = drawn(engine_of(decoder), prompts_P)
        truth_T = packed_logprobs(decoder, prompts_P[0], samples[0])
    tokens = torch.tensor(samples[0].tokens_T)
    assert samples[0].logprobs_T == pytest.approx(
        truth_T[torch.arange(len(tokens)), tokens].tolist(), abs=1e-5
    )
    assert samples[0].logprobs_T[0] != pytest.approx(plain[0].logprobs_T[0], abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 4},
        {"block_size": 1},
        {"block_size": 5},
        {"block_size": 64},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 33, "max_num_seqs": 5, "block_size": 8},
        {"decode_steps_per_sync": 2},
        {"decode_steps_per_sync": 5, "max_num_seqs": 4},
        {"decode_steps_per_sync": 16, "block_size": 4, "max_num_seqs": 3},
        {"exact": True, "decode_steps_per_sync": 3, "max_num_seqs": 6},
        {"exact": True},
    ],
    ids=str,
)
def test_a_sample_does_not_depend_on_the_engines_settings(decoder, plain, settings):
    assert_same(drawn(engine_of(decoder, **settings), prompts_of(*LENGTHS)), plain)


def test_samples_join_and_leave_while_a_burst_runs(decoder, plain, monkeypatch):
    unread, set_batch = [], DecodeRunner.set_batch

    def noted(runner, *rows):
        unread.append(runner.num_unread_steps)
        set_batch(runner, *rows)

    monkeypatch.setattr(DecodeRunner, "set_batch", noted)
    engine = engine_of(decoder, max_num_seqs=4, decode_steps_per_sync=2)
    assert_same(drawn(engine, prompts_of(*LENGTHS)), plain)
    assert unread[0] == 0 and sum(steps > 0 for steps in unread) > len(unread) / 2


@pytest.mark.parametrize("burst_steps", [1, 3, 16])
@pytest.mark.parametrize("num_pages, page_tokens", [(14, 4), (18, 4), (60, 1)])
def test_a_sample_does_not_depend_on_pauses(decoder, plain, num_pages, page_tokens, burst_steps):
    engine = engine_of(
        decoder,
        block_size=page_tokens,
        kv_cache_gb=kv_gb_for(decoder, num_pages, page_tokens),
        max_num_batched_tokens=11,
        decode_steps_per_sync=burst_steps,
    )
    assert_same(drawn(engine, prompts_of(*LENGTHS)), plain)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.peak_pages <= num_pages
    assert engine.stats.prefill_tokens > sum(LENGTHS)


def test_a_sample_does_not_depend_on_its_batch(decoder, plain):
    engine = engine_of(decoder)
    prompts_P = prompts_of(*LENGTHS)
    alone = [s for prompt in prompts_P for s in drawn(engine, [prompt])]
    assert_same(alone, plain)
    fewer = drawn(engine, prompts_P[::-1], num_samples=2)
    expected = [plain[3 * p + g] for p in reversed(range(len(prompts_P))) for g in range(2)]
    assert_same(fewer, expected)


def test_every_sample_has_its_own_randomness_and_a_step_or_a_seed_draws_others(decoder):
    engine, prompts_P = engine_of(decoder, stop_token_ids=frozenset()), prompts_of(9, 9, 9)
    prompts_P = [replace(prompt, tokens_T=prompts_P[0].tokens_T) for prompt in prompts_P]
    seen = set()
    for changed in ({}, {"step": 3}, {"seed": 6}):
        seen |= {tuple(s.tokens_T) for s in drawn(engine, prompts_P, **changed)}
    assert len(seen) == 3 * 3 * 3


@pytest.mark.parametrize("prompt_tokens", [7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("max_tokens", [1, 2, 8, 9, 10])
def test_page_boundaries_change_nothing(decoder, prompt_tokens, max_tokens):
    prompts_P = prompts_of(prompt_tokens)
    engine = engine_of(decoder, block_size=8, stop_token_ids=frozenset())
    samples = drawn(engine, prompts_P, num_samples=2, max_tokens=max_tokens)
    for sample in samples:
        assert len(sample.tokens_T) == max_tokens and sample.finish == "length"
        truth_TV = packed_logprobs(decoder, prompts_P[0], sample)
        truth_T = truth_TV[torch.arange(max_tokens), torch.tensor(sample.tokens_T)]
        assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-5)


def test_pages_no_larger_than_asked_for_never_leak_what_nobody_wrote(decoder):
    # Each call leaves its numbers in the pages; an engine that read them would differ from a fresh one.
    engine = engine_of(decoder, block_size=4)
    for length in (60, 3, 17):
        fresh = drawn(engine_of(decoder, block_size=4), prompts_of(length))
        assert_same(drawn(engine, prompts_of(length)), fresh)


def test_a_shared_prompt_is_computed_and_held_once(decoder):
    prompt_tokens, num_samples, page_tokens = 34, 6, 8
    engine = engine_of(decoder, block_size=page_tokens, stop_token_ids=frozenset())
    drawn(engine, prompts_of(prompt_tokens), num_samples=num_samples, max_tokens=7)
    assert engine.stats.prefill_tokens == prompt_tokens
    # The prompt's 4 full pages and its partial one; for each sample a copy of that, which 6 more tokens fill.
    assert engine.stats.peak_pages == 5 + num_samples
    apart = engine_of(decoder, block_size=page_tokens, stop_token_ids=frozenset())
    drawn(apart, prompts_of(prompt_tokens) * num_samples, num_samples=1, max_tokens=7)
    assert apart.stats.prefill_tokens == num_samples * prompt_tokens
    assert apart.stats.peak_pages == num_samples * (5 + 1)


def test_the_decode_batch_shrinks_and_is_filled_up_again(decoder, plain):
    lengths = [len(s.tokens_T) for s in plain]
    assert len(set(lengths)) > 3
    roomy, single = engine_of(decoder), engine_of(decoder, max_num_seqs=1)
    for engine in (roomy, single):
        drawn(engine, prompts_of(*LENGTHS))
        assert engine.stats.num_tokens == sum(lengths)
        assert engine.stats.tokens_per_s == pytest.approx(engine.stats.num_tokens / engine.stats.generate_s)
    assert roomy.stats.decode_forwards == max(lengths) - 1 and roomy.stats.prefill_forwards == 1
    assert single.stats.decode_forwards == sum(n - 1 for n in lengths)
    assert single.stats.prefill_forwards == len(LENGTHS)


def test_a_burst_goes_on_while_the_one_before_is_read(decoder, plain):
    engine = engine_of(decoder, decode_steps_per_sync=4, stop_token_ids=frozenset())
    samples = drawn(engine, prompts_of(9, 9), max_tokens=12)
    assert {len(s.tokens_T) for s in samples} == {12}
    assert engine.stats.decode_forwards == 11 and engine.stats.num_tokens == 6 * 12
    drawn(engine_of(decoder, decode_steps_per_sync=4), prompts_of(*LENGTHS))


def test_rows_that_ended_within_a_burst_write_nothing_more(decoder, plain):
    """Their positions are -1 on the device: pages that were released belong to others by then."""
    engine = engine_of(
        decoder, decode_steps_per_sync=8, block_size=4, max_num_seqs=4, kv_cache_gb=kv_gb_for(decoder, 26, 4)
    )
    assert_same(drawn(engine, prompts_of(*LENGTHS)), plain)
    most_steps = sum(len(s.tokens_T) for s in plain)
    assert engine.stats.decode_forwards < most_steps


def test_prompts_are_packed_into_as_few_forwards_as_prefill_tokens_allows(decoder):
    engine = engine_of(decoder, max_num_batched_tokens=43)
    drawn(engine, prompts_of(*LENGTHS))
    assert sum(LENGTHS) == 3 * 43 and engine.stats.prefill_forwards == 3


def test_a_stop_token_ends_a_sample_and_is_kept_but_is_no_text(decoder, plain):
    free = drawn(engine_of(decoder, stop_token_ids=frozenset()), prompts_of(*LENGTHS))
    assert {len(s.tokens_T) for s in free} == {12}
    for sample, longer in zip(plain, free, strict=True):
        end = next((n for n, token in enumerate(longer.tokens_T, 1) if token in STOPS), None)
        assert sample.tokens_T == longer.tokens_T[:end]
        assert sample.finish == ("length" if end is None else "stop")
        text_tokens_T = sample.tokens_T if end is None else sample.tokens_T[:-1]
        assert sample.text == tokenizer().decode(text_tokens_T, skip_special_tokens=True)


@pytest.mark.parametrize("burst_steps", [1, 4])
def test_a_stop_string_over_two_tokens_ends_a_sample_and_cuts_its_text(decoder, plain, burst_steps):
    longer = next(s for s in plain if len(s.text) > 8)
    stop = longer.text[4:6]
    engine = engine_of(decoder, decode_steps_per_sync=burst_steps)
    samples = drawn(engine, prompts_of(*LENGTHS), stop=("never", stop))
    sample = samples[plain.index(longer)]
    for other, before in zip(samples, plain, strict=True):  # whose pages it wrote to on its way, if any
        assert other.tokens_T == before.tokens_T[: len(other.tokens_T)]
        assert other.tokens_T == before.tokens_T or stop in tokenizer().decode(
            other.tokens_T, skip_special_tokens=True
        )
    assert sample.finish == "stop" and sample.text == longer.text[: longer.text.index(stop)]
    assert sample.tokens_T == longer.tokens_T[: len(sample.tokens_T)]
    whole = tokenizer().decode(sample.tokens_T, skip_special_tokens=True)
    before = tokenizer().decode(sample.tokens_T[:-1], skip_special_tokens=True)
    assert stop in whole and stop not in before


def test_the_last_of_max_tokens_may_still_be_a_stop(decoder, plain):
    place, length = next((i, len(s.tokens_T)) for i, s in enumerate(plain) if 3 < len(s.tokens_T) < 12)
    engine = engine_of(decoder)
    assert drawn(engine, prompts_of(*LENGTHS), max_tokens=length)[place].finish == "stop"
    assert drawn(engine, prompts_of(*LENGTHS), max_tokens=length - 1)[place].finish == "length"


def test_a_sample_ends_where_the_models_positions_do(decoder):
    most = decoder.architecture.max_positions
    prompts_P = prompts_of(most - 1, most - 3, 5)
    engine = engine_of(decoder, stop_token_ids=frozenset())
    samples = drawn(engine, prompts_P, num_samples=1, max_tokens=6)
    assert [(len(s.tokens_T), s.finish) for s in samples] == [(1, "length"), (3, "length"), (6, "length")]


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_without_room_for_a_sample_is_named(decoder, length):
    with pytest.raises(UserError, match=rf"prompt 41 has {length} tokens; the model allows 1 to 255"):
        drawn(engine_of(decoder), prompts_of(3, length, first_index=40))


def test_a_sample_that_can_never_fit_says_what_would(decoder):
    prompts_P = prompts_of(3, 40, first_index=70)
    too_small = engine_of(decoder, block_size=8, kv_cache_gb=kv_gb_for(decoder, 8, 8))
    with pytest.raises(
        UserError, match=r"prompt 71 needs 9 pages of KV cache .* engine\.kv_cache_gb"
    ) as caught:
        drawn(too_small, prompts_P, max_tokens=32)
    said_gb = float(re.search(r"raise it to (\S+) or more", str(caught.value))[1])
    enough = engine_of(decoder, block_size=8, kv_cache_gb=said_gb)
    assert len(drawn(enough, prompts_P, max_tokens=32)) == 6


def test_the_cache_is_no_larger_than_the_call_can_use(decoder):
    engine = engine_of(decoder, block_size=8, kv_cache_gb=1.0, max_num_seqs=4)
    assert engine.num_bytes == 0
    drawn(engine, prompts_of(9, 8), num_samples=3, max_tokens=8)
    page = page_bytes(decoder.architecture, 8, torch.float32)
    assert engine.num_bytes == (2 + 1 + 4 * 1 + 1) * page  # one that unused rows write to
    assert engine.stats.num_preemptions == 0
    drawn(engine, prompts_of(9), num_samples=3, max_tokens=40)
    assert engine.num_bytes == (2 + 3 * 5 + 1) * page
    drawn(engine, prompts_of(9), num_samples=1, max_tokens=1)
    assert engine.num_bytes == (2 + 3 * 5 + 1) * page


@pytest.mark.parametrize("lengths", [(9, 31, 1, 16, 40), (5,) * 20])
def test_a_full_sized_cache_never_pauses_nor_waits_for_pages(decoder, lengths):
    engine = engine_of(decoder, block_size=4, max_num_seqs=7, stop_token_ids=frozenset())
    drawn(engine, prompts_of(*lengths), num_samples=3, max_tokens=9)
    assert engine.stats.num_preemptions == 0
    assert engine.stats.decode_forwards == -(-len(lengths) * 3 // 7) * 8


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at_forward", [1, 2, 6])
def test_an_engine_that_was_interrupted_draws_as_before(decoder, plain, error, at_forward):
    engine = engine_of(decoder, block_size=4, kv_cache_gb=kv_gb_for(decoder, 18, 4))
    calls = []

    def interrupt(module, args, output):
        calls.append(1)
        if len(calls) == at_forward:
            raise error

    handle = decoder.norm.register_forward_hook(interrupt)
    try:
        with pytest.raises(error):
            drawn(engine, prompts_of(*LENGTHS))
    finally:
        handle.remove()
    assert_same(drawn(engine, prompts_of(*LENGTHS)), plain)


def test_a_model_that_gives_no_numbers_is_reported_and_leaves_nothing_behind(decoder, plain):
    engine = engine_of(decoder, block_size=4)
    drawn(engine, prompts_of(*LENGTHS))  # makes the cache as large as the last call needs it

    def diverge(module, args, output):
        return output * torch.nan

    handle = decoder.layers[0].mlp.register_forward_hook(diverge)
    try:
        with pytest.raises(UserError, match="prompt 0: the model's logits after 130 tokens are not finite"):
            drawn(engine, prompts_of(130))  # reaches places that the next call leaves unwritten
    finally:
        handle.remove()
    assert_same(drawn(engine, prompts_of(*LENGTHS)), plain)


def test_samples_follow_the_adapter_only_once_it_is_published():
    decoder, prompts_P = tiny(), prompts_of(6, 11)
    before = drawn(engine_of(decoder), prompts_P)
    add_adapter(decoder, AdapterConfig(rank=4), seed=1)
    engine = engine_of(decoder)
    with torch.no_grad():
        for name, master in adapter_tensors(decoder).items():
            if "lora_B" in name:
                master.add_(0.3)
    assert_same(drawn(engine, prompts_P), before)
    assert {s.version for s in before} == {0}
    engine.publish(7)
    after = drawn(engine, prompts_P)
    assert {s.version for s in after} == {7}
    assert after[0].logprobs_T[0] != pytest.approx(before[0].logprobs_T[0], abs=1e-3)


def test_the_decoder_still_learns_after_sampling():
    decoder, prompts_P = tiny(), prompts_of(6)
    add_adapter(decoder, AdapterConfig(rank=4), seed=1)
    drawn(engine_of(decoder), prompts_P)
    positions_T, attend = packed(forest((6, ())))
    decoder(torch.tensor(prompts_P[0].tokens_T), positions_T, attend).square().sum().backward()
    assert all(master.grad is not None for master in adapter_tensors(decoder).values())


def test_a_cpu_has_nothing_to_say_of_its_kernels(decoder):
    engine = engine_of(decoder)
    assert engine.notices == [] and KernelForward.obstacle(decoder, 16) == NO_KERNELS


def test_no_prompts_give_no_groups(decoder):
    assert drawn(engine_of(decoder), []) == []


@pytest.mark.parametrize("rank", [None, 4])
def test_half_precision_samples_are_no_further_from_exact_than_the_packed_forward(rank):
    decoder, prompts_P = tiny(compute=torch.bfloat16), prompts_of(9, 31, 20, 60)
    if rank:
        add_adapter(decoder, AdapterConfig(rank=rank), seed=1)
        with torch.no_grad():
            for name, master in adapter_tensors(decoder).items():
                if "lora_B" in name:
                    master.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    engine = engine_of(decoder, block_size=4, stop_token_ids=frozenset())
    engine.publish(0)
    samples = drawn(engine, prompts_P, num_samples=4, max_tokens=40)
    by_engine, packed, exact = compared(decoder, prompts_P, samples, 4)
    assert 0 < (packed - exact).abs().mean() < 0.1
    assert (by_engine - exact).abs().mean() < 1.3 * (packed - exact).abs().mean()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_what_the_cpu_draws():
    prompts_P = [replace(p, tokens_T=[t % VOCAB for t in p.tokens_T]) for p in prompts_of(*LENGTHS)]
    settings = {"block_size": 4, "max_num_batched_tokens": 50, "max_num_seqs": 9}
    for sampling in ({}, {"top_p": 0.9, "top_k": 20}, {"temperature": 0.0}):
        here = drawn(engine_of(tiny_decoder(), **settings), prompts_P, **sampling)
        there = drawn(engine_of(tiny_decoder(device="cuda"), **settings), prompts_P, **sampling)
        assert [s.tokens_T for s in there] == [s.tokens_T for s in here]
        for a, b in zip(here, there, strict=True):
            assert a.logprobs_T == pytest.approx(b.logprobs_T, abs=1e-4)
