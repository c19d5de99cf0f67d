"""Exact mode on a Hopper GPU, with the kernels: 4-bit base and adapter."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.decode.test_decode_kernels import LENGTHS, NEVER, SMALL, decoder_of, pytestmark, small_prompts
from engine.parts import engine_of, request_of
from learner.tiny import run_config
from qerl.aqn.norm_noise import noised
from qerl.config import SampleConfig
from qerl.engine.decode.kernel_forward import KernelForward
from qerl.engine.decode.linears import PackedLinears
from qerl.engine.decode.runner_cache import RunnerCache
from qerl.engine.prefill.chunk import PrefillChunk
from qerl.engine.prefill.prefill import Prefill
from qerl.learner import Learner
from qerl.models.random_weights import SHAPES
from qerl.types import Sampling

__all__ = ["pytestmark"]
SAMPLING = Sampling(max_tokens=60, temperature=0.8)


def groups_of(engine, num_samples=6):
    prompts_P = small_prompts(*LENGTHS)
    return engine.generate(request_of(prompts_P, num_samples=num_samples, sampling=SAMPLING))


def gap(engine, groups):
    recorded = [x for group in groups for s in group.samples_G for x in s.logprobs_T]
    scored = engine.score(groups, sampling=SAMPLING).cpu()
    assert len(scored) == len(recorded)
    return (scored - torch.tensor(recorded)).abs().max().item()


def made(name):
    if name == "qk_norm":
        return decoder_of(architecture=replace(SMALL, qk_norm=True, qkv_bias=False))
    if name in ("fp8", "nvfp4"):
        return decoder_of(head=name)
    return {
        "nvfp4 linears": decoder_of,
        "no adapter": partial(decoder_of, rank=None),
        "bf16 linears": partial(decoder_of, "bf16"),
        "rank 8": partial(decoder_of, rank=8),
        "torch's path": partial(decoder_of, rank=144),
        "fp32": partial(decoder_of, compute=torch.float32),
    }[name]()


DECODERS = (
    *("nvfp4 linears", "no adapter", "bf16 linears", "qk_norm", "rank 8"),
    *("fp8", "nvfp4", "torch's path", "fp32"),
)


@pytest.mark.parametrize("max_running", [8, 32, 48, 100])
@pytest.mark.parametrize("name", DECODERS)
def test_scores_are_what_was_recorded_to_the_bit(name, max_running):
    decoder = made(name)
    assert (KernelForward.obstacle(decoder, 16) is None) == (name not in ("torch's path", "fp32"))
    engine = engine_of(decoder, exact=True, max_num_seqs=max_running, stop_token_ids=frozenset(range(9)))
    groups = groups_of(engine)
    assert len({len(s.tokens_T) for group in groups for s in group.samples_G}) > 4
    assert gap(engine, groups) == 0
    assert gap(engine, groups[3:]) == 0


OTHERS = [("nf4", 64), ("fp8", 64), ("int8", 64)]
WIDE = replace(SHAPES["qwen2.5-7b"], num_layers=2, vocab_size=1024)


@pytest.mark.parametrize("kernels", ["hopper", "portable"])
@pytest.mark.parametrize(("format", "max_running"), [("nvfp4", 64), ("nvfp4", 200), ("bf16", 64), *OTHERS])
def test_a_models_widths_split_their_sums_and_change_no_bit(format, max_running, kernels):
    decoder = decoder_of(format, architecture=WIDE)
    settings = {"max_num_seqs": max_running, "stop_token_ids": NEVER, "kernels": kernels}
    engine = engine_of(decoder, exact=True, **settings)
    assert gap(engine, groups_of(engine, 24)) == 0


def test_more_rows_at_once_would_change_bits(monkeypatch):
    monkeypatch.setattr(PackedLinears, "_by_slices", lambda self, product, *operands: product(*operands))
    engine = engine_of(decoder_of(architecture=WIDE), exact=True, max_num_seqs=64, stop_token_ids=NEVER)
    assert gap(engine, groups_of(engine, 24)) > 0


@pytest.mark.parametrize(
    "settings", [{"kv_cache_dtype": "fp8"}, {"kv_cache_gb": 2e-3}, {"decode_steps_per_sync": 1}], ids=str
)
def test_whatever_the_cache_and_the_bursts(settings):
    engine = engine_of(decoder_of(), exact=True, max_num_seqs=48, stop_token_ids=NEVER, **settings)
    groups = groups_of(engine, 12)
    assert (engine.stats.num_preemptions > 0) == ("kv_cache_gb" in settings)
    assert gap(engine, groups) == 0


@pytest.mark.parametrize("broken", ["prefill", "race"])
def test_each_part_of_the_mode_is_needed(broken, monkeypatch):
    decoder = decoder_of()
    if broken == "race":
        monkeypatch.setattr(KernelForward, "together", KernelForward.__call__)
    engine = engine_of(decoder, exact=True, max_num_seqs=100, stop_token_ids=NEVER)
    with monkeypatch.context() as wide:
        if broken == "prefill":
            wide.setattr(
                RunnerCache, "teacher_forcing", lambda runners: Prefill(decoder, engine._cache, 4096)
            )
        groups = groups_of(engine)
    assert gap(engine, groups) > 0


@torch.no_grad()
def test_prefill_in_one_piece_is_prefill_in_chunks_is_decode():
    engine = engine_of(decoder_of(), exact=True, max_num_seqs=16, stop_token_ids=NEVER)
    groups_of(engine)
    assert engine._cache is not None
    replay, pages = engine._runners.teacher_forcing(), list(range(9))
    (prompt,) = small_prompts(130)
    with engine._cache.present():
        chunks = replay.hidden_states([PrefillChunk(prompt.tokens_T, 0, pages)])
        whole = torch.cat([hidden.clone() for hidden in chunks])[:130]
        pieces = [PrefillChunk(prompt.tokens_T[:53], 0, pages), PrefillChunk(prompt.tokens_T[53:], 53, pages)]
        assert torch.equal(replay(pieces), whole[[52, 129]])
        steps = [replay([PrefillChunk([token], i, pages)]) for i, token in enumerate(prompt.tokens_T)]
        assert torch.equal(torch.cat(steps), whole)


@pytest.mark.parametrize("learn", [{}, {"updates_per_step": 2, "num_iterations": 2}], ids=str)
def test_the_learners_logprobs_are_the_engines_to_the_bit(learn):
    decoder = decoder_of()
    engine = engine_of(decoder, exact=True, max_num_seqs=48, stop_token_ids=NEVER)
    groups = [
        replace(g, samples_G=[replace(s, reward=1.0, advantage=i - 2.5) for i, s in enumerate(g.samples_G)])
        for g in groups_of(engine)
    ]
    config = replace(run_config(learn=learn), sample=SampleConfig(max_tokens=60, temperature=0.8))
    learner = Learner(decoder, config, score=partial(engine.score, sampling=SAMPLING))
    metrics = learner.step(groups)
    assert metrics["mismatch_max"] == metrics["mismatch_kl"] == 0 < metrics["own_mismatch_max"]
    assert metrics["importance_weight_mean"] == 1 and (metrics["ratio_mean"] == 1) == (not learn)
    engine.publish(learner.version)
    again = groups_of(engine)
    assert gap(engine, again) == 0 and again != groups


def test_noise_alone_makes_a_difference():
    decoder = decoder_of()
    engine = engine_of(decoder, exact=True, max_num_seqs=8, stop_token_ids=NEVER)
    with noised(decoder.noise_table, sigma=0.05, unit="absolute", seed=0, step=1):
        groups = groups_of(engine)
        assert gap(engine, groups) == 0
    assert gap(engine, groups) > 1e-3
