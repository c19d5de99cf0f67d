"""Noise per group and per sample during sampling, and the learner's forward with the same noise."""

from dataclasses import replace

import pytest
import torch

from engine.parts import branched, drawn, engine_of, packed_logprobs, prompts_of
from learner.tiny import run_config
from models.tiny import forest, packed, tiny
from qerl.aqn.norm_noise import noised
from qerl.config import AdapterConfig
from qerl.cost.cache import page_bytes
from qerl.engine.generation import Generation
from qerl.learner import Learner
from qerl.models.peft.adapter import add_adapter
from qerl.types import Group

LENGTHS = (9, 31, 1, 16, 17)
NOISE = {"unit": "absolute", "seed": 0, "step": 1}
PER = pytest.mark.parametrize("per", ["group", "sample"])


def decoder_per(per, num_keys=5):
    decoder = tiny()
    decoder.noise_table.open(per, num_keys)
    return decoder


def noisy(decoder, prompts_P=None, *, sigma=0.1, num_samples=3, **settings):
    with noised(decoder.noise_table, sigma=sigma, **NOISE):
        return drawn(
            engine_of(decoder, **settings), prompts_P or prompts_of(*LENGTHS), num_samples=num_samples
        )


def under(decoder, row, prompt, sample):
    """The sample's logprobs by a forward whose every token has this row's noise."""
    vector = tiny()
    for ours, theirs in zip(vector.noise_table.norms, decoder.noise_table.norms, strict=True):
        ours.noise.copy_(theirs.noise[row])
    tokens_T = torch.tensor(sample.tokens_T)
    return packed_logprobs(vector, prompt, sample)[torch.arange(len(tokens_T)), tokens_T].tolist()


def test_by_group_a_sample_is_drawn_under_its_groups_noise():
    decoder, prompts_P = decoder_per("group"), prompts_of(*LENGTHS)
    samples = noisy(decoder, prompts_P)
    with noised(decoder.noise_table, sigma=0.1, **NOISE):
        rows = decoder.noise_table.rows([(p.index, [0]) for p in prompts_P])
        for i, sample in enumerate(samples):
            wanted = [under(decoder, row, prompts_P[i // 3], sample) for row, _ in rows]
            assert sample.logprobs_T == pytest.approx(wanted[i // 3], abs=1e-5)
            assert sample.logprobs_T != pytest.approx(wanted[i // 3 - 1], abs=1e-3)


@pytest.mark.parametrize(
    ("per", "sigma", "num_different"), [("sample", 0.3, 3), ("sample", 0.0, 1), ("group", 0.3, 1)]
)
def test_under_the_same_uniform_draws_samples_differ_by_their_noise_alone(
    per, sigma, num_different, monkeypatch
):
    key = Generation._key
    monkeypatch.setattr(Generation, "_key", lambda self, s: key(self, s.group.samples_G[0]))
    samples = noisy(decoder_per(per), sigma=sigma)
    texts = [tuple(s.tokens_T) for s in samples]
    differ = [len(set(texts[i : i + 3])) for i in range(0, len(texts), 3)]
    assert max(differ) == num_different
    for first in range(
        0, len(samples), 3
    ):  # the prompts, and so the first tokens, are without noise by sample
        assert len({s.tokens_T[0] for s in samples[first : first + 3]}) == 1
        logprobs = {s.logprobs_T[0] for s in samples[first : first + 3]}
        assert max(logprobs) - min(logprobs) < 1e-6


@PER
@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 4}, {"max_num_batched_tokens": 7, "decode_steps_per_sync": 5}, {"exact": True}],
)
def test_a_sample_depends_neither_on_its_batch_nor_on_pauses(per, settings):
    whole = noisy(decoder_per(per))
    quiet = noisy(decoder_per(per), sigma=0.0)
    assert [s.tokens_T for s in whole] != [s.tokens_T for s in quiet]
    prompts_P = prompts_of(*LENGTHS)
    decoder = decoder_per(per)
    kv_gb = 14.5 * page_bytes(decoder.architecture, 4, torch.float32) / 1e9
    alone = [s for prompt in reversed(prompts_P) for s in noisy(decoder, [prompt], num_samples=2)]
    some = [whole[3 * p + g] for p in reversed(range(len(prompts_P))) for g in range(2)]
    with noised(decoder.noise_table, sigma=0.1, **NOISE):
        engine = engine_of(decoder, block_size=4, kv_cache_gb=kv_gb, **settings)
        preempted = drawn(engine, prompts_P)
    assert engine.stats.num_preemptions > 0
    for got, want in ((alone, some), (preempted, whole)):
        assert [s.tokens_T for s in got] == [s.tokens_T for s in want]
        for a, b in zip(got, want, strict=True):
            assert a.logprobs_T == pytest.approx(b.logprobs_T, abs=1e-5)


@PER
@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "exact": True}], ids=str)
def test_a_branch_is_drawn_under_the_noise_of_its_sample(per, settings):
    decoder, prompts_P = decoder_per(per), prompts_of(*LENGTHS)
    with noised(decoder.noise_table, sigma=0.1, **NOISE):
        engine = engine_of(decoder, stop_token_ids=frozenset(), **settings)
        _, branches, found, _ = branched(engine, prompts_P)
        assert len(branches) > 3
        for group, (parents, pivot) in zip(branches, found, strict=True):
            members = [(parents.prompt.index, [pivot.sample_index])]
            ((prompt_row, (row,)),) = decoder.noise_table.rows(members)
            for sample in group.samples_G:
                assert sample.sample_index == pivot.sample_index
                tokens_T = torch.tensor(group.prompt.tokens_T + sample.tokens_T[:-1])
                num_prompt = len(group.prompt.tokens_T)
                rows_T = torch.full((len(tokens_T),), row, dtype=torch.int32)
                rows_T[:num_prompt] = prompt_row
                positions_T, attend = packed(forest((len(tokens_T), ())))
                hidden_TD = decoder(tokens_T, positions_T, attend, noise_rows_T=rows_T)
                logprobs_TV = decoder.logits(hidden_TD)[num_prompt - 1 :].log_softmax(-1)
                want = logprobs_TV[range(len(sample.tokens_T)), sample.tokens_T].tolist()
                assert sample.logprobs_T == pytest.approx(want, abs=1e-5)


@PER
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_the_learner_reads_each_sample_under_its_own_noise(per, recompute):
    """Groups in another order, some samples left out, in micro-batches: the ratio stays 1 with noise on both
    sides, is not without the learner's, and the correction is what was recorded against it."""
    decoder = tiny()
    add_adapter(decoder, AdapterConfig(rank=4), seed=1)
    decoder.noise_table.open(per, 5)
    prompts_P, samples = prompts_of(*LENGTHS), noisy(decoder)
    config = run_config(
        learn={"max_tokens_per_microbatch": 64, "gradient_checkpointing": recompute},
        adapter=AdapterConfig(rank=4),
    )
    groups = [
        Group(
            prompt=prompts_P[p],
            samples_G=[replace(samples[3 * p + g], reward=float(g), advantage=g - 1.0) for g in (2, 0)],
        )
        for p in (3, 0, 4, 1)
    ]
    learner = Learner(decoder, config)
    with noised(decoder.noise_table, sigma=0.1, **NOISE):
        both = learner.step(groups)
    assert both["mismatch_max"] < 2e-5 and both["importance_weight_mean"] == pytest.approx(1, abs=1e-5)
    sampler_only = Learner(decoder, config).step(groups)
    assert sampler_only["mismatch_max"] > 0.01 and both["grad_norm"] > 0
