"""Exact mode of models whose layers have recurrent states."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.cache.test_recurrent_states import FEW, gb_for
from engine.decode.test_decode_hybrid_gpu import ARCHITECTURES
from engine.decode.test_decode_kernels import decoder_of
from engine.parts import branched, engine_of, prompts_of, request_of
from learner.tiny import run_config
from models.family_rows import load, oracle, save
from parity.test_exact import SAMPLING, gap, groups_of, taught
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig, SampleConfig
from qerl.engine.decode import forward as decode_forward
from qerl.engine.decode.runner_cache import RunnerCache, exact_mode_obstacle
from qerl.engine.prefill.chunk import PrefillChunk
from qerl.engine.prefill.prefill import Prefill
from qerl.learner import Learner
from qerl.models.peft.adapter import adapter_tensors, add_adapter, publish

LENGTHS = (9, 1, 20)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = "Qwen3_5", "Qwen3Next"
    return {name: save(oracle(name), tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture
def policy(folders):
    """Return a function that makes a small decoder with an adapter."""

    def made(family="Qwen3_5", compute=FP32):
        decoder = load(folders[family], compute=compute)
        add_adapter(decoder, AdapterConfig(rank=4), seed=1)
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, master in adapter_tensors(decoder).items():
                if "lora_B" in name:
                    master.normal_(0, 0.1, generator=rng)
        publish(decoder)
        return decoder

    return made


@pytest.mark.parametrize(
    ("family", "compute", "settings"),
    [
        ("Qwen3_5", FP32, {"block_size": 4, "max_num_seqs": 6}),
        ("Qwen3Next", BF16, {"max_num_seqs": 33}),
        ("Qwen3_5", BF16, {"kv_cache_dtype": "fp8", "max_num_seqs": 20}),
        ("Qwen3Next", FP32, {"decode_steps_per_sync": 5, "max_num_seqs": 7}),
    ],
    ids=str,
)
def test_scores_of_a_hybrid_are_what_was_recorded_to_the_bit(family, compute, settings, policy):
    engine = engine_of(policy(family, compute), exact=True, **settings)
    groups = groups_of(engine, LENGTHS)
    assert gap(engine, groups) == 0
    with noised(engine._decoder.noise_table, sigma=0.05, unit="absolute", seed=0, step=1):
        assert gap(engine, groups_of(engine, LENGTHS)) == 0 < gap(engine, groups)


def test_neighbours_in_the_batch_change_no_bit_of_a_hybrids_sample(policy):
    engine = engine_of(policy(), exact=True, max_num_seqs=20)
    for group in groups_of(engine, LENGTHS)[::2]:
        (alone,) = engine.generate(request_of([group.prompt], num_samples=5, sampling=SAMPLING))
        assert alone == group
        assert gap(engine, [group]) == 0


def test_pauses_change_no_bit(policy):
    decoder, long = policy(), replace(SAMPLING, max_tokens=70)
    settings = {"exact": True, "block_size": 1, "max_num_seqs": 3, "stop_token_ids": FEW}
    room = {"kv_cache_gb": gb_for(decoder, 176, 5, 1)}
    roomy, tight = engine_of(decoder, **settings), engine_of(decoder, **settings, **room)
    found = [
        engine.generate(request_of(prompts_of(31, 20), num_samples=2, sampling=long))
        for engine in (roomy, tight)
    ]
    assert tight.stats.num_preemptions > 0 and found[0] == found[1]
    assert gap(tight, found[0]) == 0


def test_scores_with_two_slots_are_those_with_many(policy):
    decoder = policy()
    groups = groups_of(engine_of(decoder, exact=True, max_num_seqs=16), LENGTHS)
    few = engine_of(decoder, exact=True, max_num_seqs=16, kv_cache_gb=gb_for(decoder, 5, 2, 16))
    assert gap(few, groups) == 0 and few._cache.space.slots == 2


def test_branches_of_a_hybrid_are_scored_to_the_bit(policy):
    engine = engine_of(policy(), exact=True, max_num_seqs=20, block_size=4)
    groups, branches, pivots, _ = branched(engine, prompts_of(*LENGTHS), max_tokens=24, temperature=0.7)
    assert len(pivots) == 3
    assert gap(engine, groups) == gap(engine, branches) == 0


@torch.no_grad()
def test_a_prompts_states_are_those_of_decode_steps(policy):
    """In one piece, in two and token by token."""
    engine = engine_of(policy(), exact=True, max_num_seqs=16, block_size=4)
    groups_of(engine, (60,))
    replay, states, tokens_T = engine._runners.teacher_forcing(), engine._cache.states, list(range(1, 61))
    found = []
    for slot, ends in enumerate(((60,), (23, 60), range(1, 61))):
        first = 0
        for end in ends:
            chunk = PrefillChunk(tokens_T[first:end], first, list(range(15)), state=[slot])
            hidden_1D, first = replay([chunk]), end
        found.append((hidden_1D, states.conv[:, slot].clone(), states.state[:, slot].clone()))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("broken", ["prefill", "order"])
def test_each_part_of_a_hybrids_exact_mode_is_needed(broken, policy, monkeypatch):
    engine = engine_of(policy(), exact=True, max_num_seqs=20)
    with monkeypatch.context() as wide:
        if broken == "prefill":
            wide.setattr(
                RunnerCache, "teacher_forcing", lambda runners: Prefill(engine._decoder, engine._cache, 4096)
            )
        else:
            wide.setattr(decode_forward, "_steps_in_order", decode_forward._one_step)
        groups = groups_of(engine, LENGTHS)
    assert gap(engine, groups) > 0


def test_the_learners_logprobs_of_a_hybrid_are_the_engines_to_the_bit(policy):
    decoder = policy()
    engine = engine_of(decoder, exact=True, max_num_seqs=16)
    config = replace(run_config(), sample=SampleConfig(max_tokens=24, temperature=0.7))
    learner = Learner(decoder, config, score=partial(engine.score, sampling=SAMPLING))
    for _ in range(2):
        metrics = learner.step(taught(groups_of(engine, LENGTHS)))
        assert metrics["mismatch_max"] == metrics["mismatch_kl"] == 0 < metrics["own_mismatch_max"]
        assert metrics["importance_weight_mean"] == 1 and metrics["grad_norm"] > 0
        engine.publish(learner.version)


def test_the_decode_kernels_leave_hybrids_to_pytorch_in_exact_mode(policy):
    obstacle = exact_mode_obstacle(policy().architecture)
    assert obstacle is not None and "recurrent states" in obstacle


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compute", [FP32, BF16], ids=["fp32", "bf16"])
def test_on_a_gpu_scores_of_a_hybrid_are_what_was_recorded_to_the_bit(compute):
    engine = engine_of(
        decoder_of(architecture=ARCHITECTURES["by part"], compute=compute), exact=True, max_num_seqs=20
    )
    assert engine.kernels == "torch"
    groups = groups_of(engine, LENGTHS)
    assert gap(engine, groups) == 0
