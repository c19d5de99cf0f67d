"""The parity chain, link by link: equal to rounding as a rule, equal to the bit in exact mode.

    prefill in one piece = in chunks      prefill = decode      engine = learner      one batch = another

Graph = eager: tests/engine/decode/test_decode_kernels.py. With the GPU's kernels:
tests/parity/test_exact_hopper.py.
"""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.parts import compared, drawn, engine_of, prompts_of, request_of
from learner.tiny import run_config
from models.tiny import oracle, ported, tiny
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig, EngineConfig, RunConfig, SampleConfig
from qerl.cost.cache import page_bytes
from qerl.engine.decode.runner_cache import RunnerCache
from qerl.engine.decode.teacher_forcing import TeacherForcing
from qerl.engine.prefill.chunk import PrefillChunk
from qerl.engine.prefill.prefill import Prefill
from qerl.errors import UserError
from qerl.formats import FORMATS, NVFP4
from qerl.learner import Learner
from qerl.models.peft.adapter import adapter_tensors, add_adapter, publish
from qerl.types import Sampling

LENGTHS = (9, 31, 1, 16, 17, 15, 40)
SAMPLING = Sampling(max_tokens=16, temperature=0.7)
COMPUTES = pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def policy(compute=torch.float32, family="Llama"):
    decoder = tiny(family, compute=compute)
    add_adapter(decoder, AdapterConfig(rank=4), seed=1)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, master in adapter_tensors(decoder).items():
            if "lora_B" in name:
                master.normal_(0, 0.1, generator=rng)
    publish(decoder)
    return decoder


def in_two_formats(compute):
    """The policy in NVFP4, but for a group, one linear of a group, and a linear alone in BF16."""
    decoder = policy(compute)
    in_bf16 = re.compile(r"layers.0.self_attn.[qkv]_proj|layers.1.self_attn.v_proj|layers.2.mlp.down_proj")
    for name, linear in decoder.linears():
        if not in_bf16.fullmatch(name):
            assert linear.weight is not None
            linear.load_weight(NVFP4.encode(linear.weight.decode()))
    return decoder


def groups_of(engine, lengths=LENGTHS, sampling=SAMPLING, *, num_samples=5):
    return engine.generate(request_of(prompts_of(*lengths), num_samples=num_samples, sampling=sampling))


def recorded(groups):
    return torch.tensor([x for group in groups for s in group.samples_G for x in s.logprobs_T])


def gap(engine, groups):
    return (engine.score(groups, sampling=SAMPLING).cpu() - recorded(groups)).abs().max().item()


def rms(x_T):
    return x_T.square().mean().sqrt().item()


def taught(groups):
    return [
        replace(
            g, samples_G=[replace(s, reward=float(i), advantage=i - 2.0) for i, s in enumerate(g.samples_G)]
        )
        for g in groups
    ]


@pytest.mark.parametrize(
    ("family", "compute", "settings"),
    [
        ("Llama", torch.float32, {"block_size": 4, "max_num_seqs": 6}),
        ("Qwen3", torch.bfloat16, {"block_size": 5, "max_num_seqs": 17}),
        ("Llama", torch.bfloat16, {"kv_cache_dtype": "fp8", "max_num_seqs": 20}),
        ("Qwen3", torch.float32, {"kv_cache_dtype": "fp8", "max_num_seqs": 6}),
        ("Llama", torch.bfloat16, {"decode_steps_per_sync": 5, "max_num_seqs": 7}),
        ("Qwen3", torch.float32, {"decode_steps_per_sync": 1, "max_num_seqs": 17}),
    ],
    ids=str,
)
def test_scores_are_what_was_recorded_to_the_bit(family, compute, settings):
    engine = engine_of(policy(compute, family), exact=True, **settings)
    assert gap(engine, groups_of(engine, num_samples=3)) == 0


@COMPUTES
def test_samples_of_a_step_and_what_their_neighbours_are_change_no_bit(compute):
    engine = engine_of(policy(compute), exact=True, max_num_seqs=20)
    together = groups_of(engine, num_samples=3)
    for group in together[::2]:
        (alone,) = engine.generate(request_of([group.prompt], num_samples=3, sampling=SAMPLING))
        assert alone == group
        assert gap(engine, [group]) == 0


def test_pauses_and_scores_in_many_lots_change_no_bit():
    decoder = policy()
    roomy = engine_of(decoder, exact=True, block_size=4)
    kv_gb = 27.5 * page_bytes(decoder.architecture, 4, torch.float32) / 1e9
    tight = engine_of(decoder, exact=True, block_size=4, kv_cache_gb=kv_gb)
    groups = groups_of(tight)
    assert tight.stats.num_preemptions > 0 and groups == groups_of(roomy)
    assert gap(tight, groups) == 0


@pytest.mark.parametrize("broken", ["rows", "prefill"])
def test_each_part_of_the_mode_is_needed(broken, monkeypatch):
    """Rows are tried in fp32: on this project's CPUs bf16's products are the same at every number of rows."""
    decoder = policy(torch.float32 if broken == "rows" else torch.bfloat16)
    if broken == "rows":
        monkeypatch.setattr(RunnerCache, "_exact_rows", lambda self: (1, 6))
    engine = engine_of(decoder, exact=True, max_num_seqs=6 if broken == "rows" else 20)
    if broken == "prefill":
        with monkeypatch.context() as wide:
            wide.setattr(
                RunnerCache, "teacher_forcing", lambda runners: Prefill(decoder, engine._cache, 4096)
            )
            groups = groups_of(engine)
    else:
        groups = groups_of(engine)
    assert 0 < gap(engine, groups) < 1


def _replay(decoder, rows):
    engine = engine_of(decoder, exact=True, max_num_seqs=rows, block_size=4)
    groups_of(engine, (60,))
    return engine._runners.teacher_forcing()


@COMPUTES
@torch.no_grad()
def test_prefill_in_one_piece_is_prefill_in_chunks_is_decode(compute):
    """A run is cut in two, and one is computed token by token, in chunks of the same rows."""
    replay: TeacherForcing = _replay(policy(compute), rows=16)
    tokens_T, pages = prompts_of(60)[0].tokens_T, list(range(15))
    whole = torch.cat(
        [hidden.clone() for hidden in replay.hidden_states([PrefillChunk(tokens_T, 0, pages)])]
    )[:60]
    pieces = [PrefillChunk(tokens_T[:23], 0, pages), PrefillChunk(tokens_T[23:], 23, pages)]
    cut = torch.cat([next(replay.hidden_states([run])).clone() for run in pieces[:1]])
    assert torch.equal(cut[:16], whole[:16])
    assert torch.equal(replay(pieces), whole[[22, 59]])
    steps = torch.cat([replay([PrefillChunk([token], i, pages)]) for i, token in enumerate(tokens_T)])
    assert torch.equal(steps, whole)


@COMPUTES
@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        ({}, policy),
        ({"max_num_batched_tokens": 7}, policy),
        ({"exact": True}, policy),
        ({}, in_two_formats),
        ({"exact": True}, in_two_formats),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_engine_and_learner_differ_by_the_rounding_of_their_dtype(settings, policy, compute):
    """In bf16 the engine errs from the same weights in fp32 as much as the learner's packed forward does.

    Measured ratio of both rms errors: 1.00 without exact mode, 0.87 to 1.07 with it. With it single logprobs
    of engine and learner are up to 0.14 nats apart. In fp32 they are up to 1.2e-5 apart, by the CPU's matrix
    products; a bf16 product in either is 65,536 times fp32's rounding.
    """
    decoder, prompts_P = policy(compute), prompts_of(*LENGTHS)
    samples = drawn(engine_of(decoder, **settings), prompts_P, num_samples=4)
    engine_T, packed_T, truth_T = compared(decoder, prompts_P, samples, num_samples=4)
    if compute == torch.float32:
        assert 0 < (engine_T - packed_T).abs().max() < 256 * torch.finfo(torch.float32).eps
    else:
        assert 0 < rms(engine_T - truth_T) < 1.2 * rms(packed_T - truth_T)


@COMPUTES
@pytest.mark.parametrize(
    "learn", [{}, {"max_tokens_per_microbatch": 60}, {"updates_per_step": 2, "num_iterations": 2}]
)
def test_the_learners_logprobs_are_the_engines_to_the_bit(compute, learn):
    decoder = policy(compute)
    engine = engine_of(decoder, exact=True, max_num_seqs=16)
    groups = taught(groups_of(engine, num_samples=3))
    groups[2] = replace(groups[2], samples_G=[replace(s, advantage=0.0) for s in groups[2].samples_G])
    config = replace(run_config(learn=learn), sample=SampleConfig(max_tokens=16, temperature=0.7))
    metrics = Learner(decoder, config, score=partial(engine.score, sampling=SAMPLING)).step(groups)
    assert metrics["mismatch_max"] == metrics["mismatch_abs"] == metrics["mismatch_kl"] == 0
    assert metrics["importance_weight_mean"] == 1 and metrics["own_mismatch_max"] > 0
    assert (metrics["ratio_mean"] == 1) == (not learn.get("updates_per_step"))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "fp8", "fp8-flow", "int8", "full"])
def test_every_format_and_full_fine_tuning_are_exact(format):
    adapter = AdapterConfig(rank=4, kind="full" if format == "full" else "lora")
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
    weight_format = FORMATS["bf16" if format == "full" else format]
    decoder = ported(oracle(**shape), compute=torch.bfloat16, weight_format=weight_format)
    add_adapter(decoder, adapter, seed=1)
    engine = engine_of(decoder, exact=True, max_num_seqs=16)
    sampling = replace(SAMPLING, max_tokens=12)
    sample = SampleConfig(max_tokens=12, temperature=0.7)
    config = replace(run_config(), adapter=adapter, sample=sample)
    learner = Learner(decoder, config, score=partial(engine.score, sampling=sampling))
    for _ in range(2):
        metrics = learner.step(taught(groups_of(engine, (9, 31, 16), sampling, num_samples=3)))
        assert metrics["mismatch_max"] == 0 < metrics["own_mismatch_max"]
        engine.publish(learner.version)


def test_the_gradient_is_that_of_the_learners_own_kernels():
    grads = []
    for is_exact in (False, True):
        decoder = policy()
        engine = engine_of(decoder, exact=True, max_num_seqs=16)
        config = replace(run_config(), sample=SampleConfig(max_tokens=16, temperature=0.7))
        score = partial(engine.score, sampling=SAMPLING) if is_exact else None
        learner = Learner(decoder, config, score=score)
        found = {}
        learner._apply = lambda rate, decoder=decoder, found=found: found.update(
            {name: master.grad.clone() for name, master in adapter_tensors(decoder).items()}
        )
        learner.step(taught(groups_of(engine, num_samples=3)))
        grads.append(found)
    for name, grad in grads[0].items():
        assert torch.allclose(grads[1][name], grad, rtol=1e-3, atol=1e-5 * grad.abs().max().item()), name
        assert grad.abs().max() > 0


def test_scores_follow_the_weights_and_noise_alone_makes_a_difference():
    decoder = policy()
    engine = engine_of(decoder, exact=True, max_num_seqs=16)
    groups = groups_of(engine, num_samples=3)
    with noised(decoder.noise_table, sigma=0.05, unit="absolute", seed=0, step=1):
        noisy = groups_of(engine, num_samples=3)
        assert gap(engine, noisy) == 0
    assert gap(engine, noisy) > 1e-3
    assert gap(engine, groups) == 0
    with torch.no_grad():
        for master in adapter_tensors(decoder).values():
            master.mul_(1.5)
    publish(decoder)
    assert gap(engine, groups) > 1e-3
    again = groups_of(engine, num_samples=3)
    assert gap(engine, again) == 0 and again != groups


def test_a_policy_that_was_cut_is_refused():
    for cut in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(UserError, match=rf"engine\.exact .*sample\.{next(iter(cut))}"):
            RunConfig(engine=EngineConfig(exact=True), sample=SampleConfig(**cut))
