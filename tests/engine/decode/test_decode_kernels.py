"""The engine on a Hopper GPU: its kernels, graphs and bursts against the decoder's own packed forward."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import rms_error
from engine.parts import branched, compared, drawn, engine_of, packed_logprobs, prompts_of
from qerl.aqn.norm_noise import noised
from qerl.cost.cache import page_bytes
from qerl.engine.cache.kv_cache import KVCache
from qerl.engine.decode.kernel_forward import KernelForward
from qerl.engine.decode.linears import PackedLinears
from qerl.engine.decode.runner import DecodeRunner
from qerl.engine.decode.runner_cache import RunnerCache
from qerl.formats import FP8
from qerl.kernels.attention.decode_state import DecodeState
from qerl.kernels.head.head_sample import NVFP4Head
from qerl.kernels.head.logprob import chunked_logprob
from qerl.models.peft.adapter import adapter_tensors
from qerl.models.random_weights import SHAPES, random_decoder
from qerl.types import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
SMALL = replace(
    SHAPES["qwen2.5-0.5b"],
    num_layers=3,
    width=256,
    num_heads=6,
    num_kv_heads=2,
    ff_width=512,
    vocab_size=1024,
)
LENGTHS = (9, 31, 1, 16, 17, 15, 40, 130)
NEVER = frozenset()
FACTOR = 1.3  # an engine's mean error over the packed bf16 forward's, both against fp32: they round elsewhere


def decoder_of(format="nvfp4", *, rank=16, architecture=SMALL, compute=torch.bfloat16, head="bf16"):
    decoder = random_decoder(
        architecture, format=format, rank=rank, device=torch.device("cuda"), seed=3, compute=compute
    )
    with torch.no_grad():
        decoder.lm_head.weight.mul_(8)  # logits that differ by more than rounding
    decoder.lm_head.pack(head)
    if format == "nvfp4":
        for layer in decoder.layers:
            layer.tile()
    return decoder


@pytest.fixture(scope="module")
def decoder():
    return decoder_of()


def small_prompts(*lengths):
    return [replace(p, tokens_T=[17 * t % 1024 for t in p.tokens_T]) for p in prompts_of(*lengths)]


def error_ratio(decoder, prompts_P, samples, num_samples=1, temperature=1.0):
    """Mean |engine - exact| of the sampled tokens' logprobs over mean |packed bf16 forward - exact|."""
    engine, packed, exact = compared(decoder, prompts_P, samples, num_samples, temperature)
    # Some random hybrids lose more than 1 nat of a token to 16 bits alone, in the packed forward too.
    assert (engine - exact).abs().max() < max(1, 1.5 * (packed - exact).abs().max())
    return mean_ratio(engine, packed, exact)


def mean_ratio(engine, packed, exact):
    return ((engine - exact).abs().mean() / (packed - exact).abs().mean()).item()


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
@pytest.mark.parametrize("rank", [None, 1, 8, 16])
def test_logprobs_are_the_packed_forwards(format, rank):
    decoder, prompts_P = decoder_of(format, rank=rank), small_prompts(*LENGTHS)
    assert KernelForward.obstacle(decoder, 16) is None
    samples = drawn(engine_of(decoder, stop_token_ids=NEVER), prompts_P, num_samples=4, max_tokens=40)
    assert error_ratio(decoder, prompts_P, samples, 4) < FACTOR


class Calls(TorchDispatchMode):
    """The operations of torch that ran inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_bf16_product_is_one_call_with_its_adapter_in_it():
    """Four a layer: nothing adds the adapters' parts, joins x and u, or casts a bias."""
    runner, cache = _runner(decoder_of("bf16"), max_rows=8)
    _fill(runner._state, rows=8)
    with cache.present(), Calls() as calls:
        runner._forward(runner._state, 8)
    assert sum(name in ("mm", "addmm") for name in calls.names) == 4 * SMALL.num_layers
    assert not {"cat", "copy_", "add_", "_to_copy"} & set(calls.names)


@pytest.mark.parametrize(("num_samples", "makers"), [(12, 4), (15, 3), (20, 3)])
def test_products_compute_lora_hidden_or_are_given_it(num_samples, makers, decoder, monkeypatch):
    """96, 120 and 160 rows; gate and up are given it from 97 on."""
    answers_of, computes_lora_hidden = defaultdict(list), PackedLinears.computes_lora_hidden

    def recorded(self, rows, group):
        answers_of[rows].append(computes_lora_hidden(self, rows, group))
        return answers_of[rows][-1]

    monkeypatch.setattr(PackedLinears, "computes_lora_hidden", recorded)
    prompts_P, rows = small_prompts(*LENGTHS), len(LENGTHS) * num_samples
    engine = engine_of(decoder, stop_token_ids=NEVER, max_num_seqs=rows)
    samples = drawn(engine, prompts_P, num_samples=num_samples, max_tokens=12)
    assert sum(answers_of[max(answers_of)][: 4 * SMALL.num_layers]) == makers * SMALL.num_layers
    assert error_ratio(decoder, prompts_P, samples, num_samples) < FACTOR


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("head", "kind"), [("fp8", FP8), ("nvfp4", NVFP4Head)])
def test_a_quantized_head_is_the_learners_too(head, kind, tied):
    """Drawn by the head's kernel from the packed weight, and from logits of its operand (top_k of all)."""
    architecture, prompts_P = replace(SMALL, tied_head=tied), small_prompts(*LENGTHS)
    decoder = decoder_of(architecture=architecture, head=head)
    full = decoder_of(architecture=architecture)
    engine = engine_of(decoder, stop_token_ids=NEVER)
    for sampling in ({}, {"top_k": SMALL.vocab_size}):
        samples = drawn(engine, prompts_P, num_samples=4, temperature=0.7, max_tokens=40, **sampling)
        assert error_ratio(decoder, prompts_P, samples, 4, 0.7) < FACTOR
        assert mean_ratio(*compared(full, prompts_P, samples, 4, 0.7)) > 1.5 * FACTOR
    assert isinstance(engine._runners._head.head, kind)
    operand_VD, alpha = decoder.lm_head.operand(), decoder.lm_head.alpha
    hidden_MD = torch.randn(40, SMALL.width, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    logits_MV = engine._runners._head.logits(hidden_MD.bfloat16())
    truth_MV = alpha * (hidden_MD.bfloat16().double() @ operand_VD.double().T)
    assert rms_error(logits_MV, truth_MV) < 1e-4
    learners_M, _ = chunked_logprob(
        hidden_MD.bfloat16(),
        operand_VD,
        torch.arange(40, device="cuda"),
        temperature=0.7 / alpha,
        chunk_tokens=16,
    )
    truth_M = (truth_MV / 0.7).log_softmax(1)[range(40), range(40)]
    assert (learners_M - truth_M).abs().max() < 1e-3


def test_qwen3s_head_norms_are_applied():
    decoder = decoder_of(architecture=replace(SMALL, qk_norm=True, qkv_bias=False))
    for layer in decoder.layers:
        layer.self_attn.q_norm.weight.uniform_(0.5, 2.0)
        layer.self_attn.k_norm.weight.uniform_(0.5, 2.0)
    prompts_P = small_prompts(*LENGTHS)
    samples = drawn(engine_of(decoder, stop_token_ids=NEVER), prompts_P, num_samples=1, max_tokens=40)
    assert error_ratio(decoder, prompts_P, samples) < FACTOR


def test_greedy_tokens_are_the_packed_forwards_arg_max(decoder):
    prompts_P = small_prompts(*LENGTHS)
    engine = engine_of(decoder, stop_token_ids=NEVER)
    samples = drawn(engine, prompts_P, num_samples=1, temperature=0.0, max_tokens=60)
    for prompt, sample in zip(prompts_P, samples, strict=True):
        truth_TV = packed_logprobs(decoder, prompt, sample)
        tokens = torch.tensor(sample.tokens_T, device="cuda")[:, None]
        behind_T = truth_TV.amax(-1) - truth_TV.gather(1, tokens)[:, 0]
        assert behind_T.max() < 0.05 and (behind_T == 0).float().mean() > 0.95


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_the_logprob_is_that_of_the_temperature_it_was_drawn_at(decoder, temperature, kv):
    prompts_P = small_prompts(*LENGTHS)
    engine = engine_of(decoder, kv_cache_dtype=kv, stop_token_ids=NEVER)
    samples = drawn(engine, prompts_P, num_samples=2, temperature=temperature, max_tokens=30)
    limit = FACTOR if kv == "auto" else 8  # what FP8 keys and values lose, the learner does not see
    assert error_ratio(decoder, prompts_P, samples, 2, temperature) < limit


def test_a_replayed_graph_is_the_eager_step_bit_for_bit(decoder, monkeypatch):
    bursts = []
    for records in (True, False):
        runner, cache = _runner(decoder, max_rows=8)
        monkeypatch.setattr(DecodeRunner, "_uses_graphs", records)
        with cache.present():
            bursts.append(_twelve_steps(runner, cache))
    assert all(torch.equal(a, b) for a, b in zip(*bursts, strict=True))


def _twelve_steps(runner, cache):
    torch.manual_seed(0)
    cache.pages.k.copy_(torch.randn_like(cache.pages.k.float()))
    cache.pages.v.copy_(torch.randn_like(cache.pages.v.float()))
    _fill(runner._state, rows=8)
    runner._samples_B = [None] * 8
    found = []
    for _ in range(12):
        runner._state.place_1.zero_()
        _step(runner)
        found.append(runner._state.drawn_tokens_WB[0].clone())
        found.append(runner._state.drawn_logprobs_WB[0].clone())
    return found


def _step(runner):
    if runner._uses_graphs:
        runner._step(8)
    else:
        runner.sampler.step(runner._forward(runner._state, 8), runner._state)


def _runner(decoder, max_rows) -> tuple[DecodeRunner, KVCache]:
    from qerl.config import EngineConfig

    runners = RunnerCache(decoder, EngineConfig(max_num_seqs=max_rows), NEVER)
    cache = KVCache(decoder.architecture, 64, 16, torch.bfloat16, decoder.device)
    return runners.of(cache, Sampling(max_tokens=8), 8, num_first=max_rows), cache


def _fill(state: DecodeState, rows: int) -> None:
    state.tokens_B[:rows] = torch.arange(rows, dtype=torch.int32) * 7
    state.positions_B[:rows] = torch.arange(rows, dtype=torch.int32) * 5 + 2
    state.positions_B[3] = -1
    state.ends_B[:rows] = 100
    state.keys_B[:rows] = torch.arange(rows)
    state.tables_BX[:rows, :8] = torch.arange(rows * 8, dtype=torch.int32).view(rows, 8)


@pytest.mark.parametrize(
    "settings",
    [
        {"decode_steps_per_sync": 1},
        {"decode_steps_per_sync": 5},
        {"max_num_seqs": 5},
        {"max_num_seqs": 3, "decode_steps_per_sync": 7},
        {"block_size": 32},
        {"max_num_batched_tokens": 50},
    ],
    ids=str,
)
def test_a_sample_does_not_depend_on_the_engines_settings(decoder, settings):
    """Up to 32 rows every sum of a decode step has one order. A prefill cut elsewhere may round otherwise."""
    prompts_P = small_prompts(*LENGTHS)
    plain = drawn(engine_of(decoder, stop_token_ids=frozenset(range(40))), prompts_P, max_tokens=50)
    got = drawn(engine_of(decoder, stop_token_ids=frozenset(range(40)), **settings), prompts_P, max_tokens=50)
    same = [a.tokens_T == b.tokens_T for a, b in zip(got, plain, strict=True)]
    if "max_num_batched_tokens" in settings or "block_size" in settings:
        assert sum(same) > 0.8 * len(same)
    else:
        assert all(same) and [s.logprobs_T for s in got] == [s.logprobs_T for s in plain]
    assert len({len(s.tokens_T) for s in plain}) > 4


def test_in_exact_mode_a_sample_does_not_depend_on_its_batch(decoder):
    engine = engine_of(decoder, exact=True, max_num_seqs=80, stop_token_ids=NEVER)
    prompts_P = small_prompts(*range(3, 73))
    together = drawn(engine, prompts_P, num_samples=1, max_tokens=20)
    alone = [drawn(engine, [p], num_samples=1, max_tokens=20)[0] for p in prompts_P[::9]]
    assert alone == together[::9]


def test_samples_are_preempted_and_resumed_when_pages_run_out(decoder):
    prompts_P = small_prompts(*LENGTHS)
    kv_gb = 30.5 * page_bytes(SMALL, 16, torch.bfloat16) / 1e9
    tight = engine_of(decoder, kv_cache_gb=kv_gb, stop_token_ids=NEVER)
    samples = drawn(tight, prompts_P, max_tokens=70)
    assert tight.stats.num_preemptions > 0 and {len(s.tokens_T) for s in samples} == {70}
    assert error_ratio(decoder, prompts_P, samples, 3) < FACTOR


def test_a_shared_prompt_gives_the_bits_that_separate_prompts_give(decoder):
    prompt = small_prompts(130)[0]
    engine = engine_of(decoder, stop_token_ids=NEVER)
    shared = drawn(engine, [prompt], num_samples=6, max_tokens=30)
    for g, sample in enumerate(shared):  # alone, each is its own leader
        alone = drawn(engine, [prompt], num_samples=g + 1, max_tokens=30)[g]
        assert alone.tokens_T == sample.tokens_T and alone.logprobs_T == sample.logprobs_T


def test_what_unused_pages_hold_never_matters(decoder):
    engine = engine_of(decoder, stop_token_ids=NEVER)
    prompts_P = small_prompts(*LENGTHS)
    before = drawn(engine, prompts_P, max_tokens=30)
    forwards = []

    def poison(*_):
        """Once, ahead of the first prefill."""
        if not forwards:
            engine._cache.pages.k.fill_(torch.nan)
            engine._cache.pages.v.fill_(torch.nan)
        forwards.append(1)

    handle = decoder.register_forward_pre_hook(poison)
    try:
        assert drawn(engine, prompts_P, max_tokens=30) == before and forwards
    finally:
        handle.remove()


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_recorded_graphs_follow_noise_and_adapter(format):
    decoder, prompts_P = decoder_of(format), small_prompts(20, 33)
    engine = engine_of(decoder, stop_token_ids=NEVER)
    quiet = drawn(engine, prompts_P, max_tokens=20)
    with noised(decoder.noise_table, sigma=0.1, unit="absolute", seed=0, step=1):
        noisy = drawn(engine, prompts_P, max_tokens=20)
        assert error_ratio(decoder, prompts_P, noisy, 3) < FACTOR
    assert noisy != quiet and drawn(engine, prompts_P, max_tokens=20) == quiet
    with torch.no_grad():
        for master in adapter_tensors(decoder).values():
            master.mul_(1.5)
    assert drawn(engine, prompts_P, max_tokens=20) == quiet
    engine.publish(1)
    after = drawn(engine, prompts_P, max_tokens=20)
    assert error_ratio(decoder, prompts_P, after, 3) < FACTOR
    assert [s.tokens_T for s in after] != [s.tokens_T for s in quiet]


def test_truncated_sampling_takes_the_other_path(decoder):
    prompts_P = small_prompts(*LENGTHS)
    engine = engine_of(decoder, stop_token_ids=NEVER)
    for sampling in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        samples = drawn(engine, prompts_P, num_samples=1, max_tokens=20, **sampling)
        greedy = drawn(engine, prompts_P, num_samples=1, max_tokens=20, temperature=0.0)
        same = [a.tokens_T == b.tokens_T for a, b in zip(samples, greedy, strict=True)]
        assert sum(same) >= len(same) - 1


def test_too_little_memory_says_how_much_is_needed_and_what_lowers_it(decoder):
    from qerl.errors import UserError

    total = torch.cuda.mem_get_info()[1]
    used = torch.cuda.memory_allocated() / total
    torch.cuda.set_per_process_memory_fraction(used + 0.005)
    try:
        with pytest.raises(UserError, match=r"GB.*engine\.kv_cache_dtype"):
            drawn(
                engine_of(decoder, max_num_seqs=256, kv_cache_gb=60.0),
                small_prompts(*[9] * 256),
                max_tokens=30_000,
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_who_decodes_is_said(decoder):
    assert engine_of(decoder).notices == []
    (pages,) = engine_of(decoder, block_size=8).notices
    assert "decode kernels unavailable" in pages and "pages of 8" in pages
    assert engine_of(decoder_of(rank=8)).notices == []
    (rank,) = engine_of(decoder_of(rank=129)).notices
    assert "ranks up to 128, here 129" in rank
    (rows,) = engine_of(decoder, max_num_seqs=300).notices
    assert "at most 256 samples at once" in rows


def test_the_torch_path_draws_from_the_same_policy(decoder):
    """Other GPUs run this path."""
    plain = decoder_of(compute=torch.float32)
    assert KernelForward.obstacle(plain, 16) is not None
    prompts_P = small_prompts(*LENGTHS)
    samples = drawn(engine_of(plain, stop_token_ids=NEVER), prompts_P, num_samples=2, max_tokens=20)
    engine, packed, _ = compared(plain, prompts_P, samples, 2)
    assert (engine - packed).abs().max() < 1e-3


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_branches_go_on_from_their_samples_pages(decoder, kv):
    """A branch's own tokens are as near to exact as the samples' are."""
    prompts_P, engine = small_prompts(*LENGTHS), engine_of(decoder, stop_token_ids=NEVER, kv_cache_dtype=kv)
    groups, branches, found, _ = branched(engine, prompts_P, num_branches=4, max_tokens=40)
    assert engine.stats.prefill_tokens == sum(LENGTHS)
    assert engine.stats.reused_tokens == sum(len(g.prompt.tokens_T) + p.prefix_tokens - 1 for g, p in found)
    errors = []
    for some in (groups, branches):
        prompts = [group.prompt for group in some for _ in group.samples_G]
        ours, _, exact = compared(decoder, prompts, [s for group in some for s in group.samples_G])
        is_own = torch.cat(
            [torch.arange(len(s.tokens_T)) >= group.prefix_tokens for group in some for s in group.samples_G]
        )
        errors.append((ours - exact)[is_own].abs().mean().item())
    assert errors[1] < FACTOR * errors[0]
    for group, (parents, pivot) in zip(branches, found, strict=True):
        n, parent = pivot.prefix_tokens, parents.samples_G[pivot.sample_index]
        assert all(s.tokens_T[:n] == parent.tokens_T[:n] for s in group.samples_G)
        assert len({tuple(s.tokens_T) for s in group.samples_G}) == 4 or n == 39


def test_branches_do_not_depend_on_lots_or_bursts(decoder):
    prompts_P = small_prompts(*LENGTHS)
    kv_gb = 60.5 * page_bytes(decoder.architecture, 16, torch.bfloat16) / 1e9
    settings = {"stop_token_ids": NEVER, "exact": True, "max_num_seqs": 48}
    roomy, tight = (
        engine_of(decoder, **settings),
        engine_of(decoder, **settings, kv_cache_gb=kv_gb, decode_steps_per_sync=3),
    )
    plain = branched(roomy, prompts_P, num_branches=4, max_tokens=40)
    again = branched(tight, prompts_P, num_branches=4, max_tokens=40)
    assert plain[3] == 1 < again[3]
    assert plain[:2] == again[:2]
    sampling = Sampling(max_tokens=40)
    told = [x for group in plain[1] for s in group.samples_G for x in s.logprobs_T]
    assert roomy.score(plain[1], sampling=sampling).tolist() == told
