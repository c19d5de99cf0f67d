"""The benchmark of steps with partial rollouts, on a tiny decoder."""

import dataclasses

import pytest
import torch

from bench.shapes import TINY
from bench.test_rollout import CASE
from benchmarks import partial
from qerl.models.random_weights import random_decoder

PARTIAL = partial.PartialCase(
    **dataclasses.asdict(CASE) | {"num_samples": 6, "sigma": 1.2, "max_tokens": 40},
    runs=3,
    extra_prompts=2,
    max_staleness=2,
    keep_kv_cache=False,
    learn=True,
    backward="bf16",
)


@pytest.fixture
def decoder():
    return random_decoder(
        dataclasses.replace(TINY, vocab_size=128),
        format="nvfp4",
        rank=16,
        device=torch.device("cpu"),
        seed=0,
        compute=torch.float32,
    )


def test_both_kinds_of_steps_learn_as_many_samples_of_the_prompts_lengths(decoder, monkeypatch):
    learned = []
    monkeypatch.setattr(partial, "drop_overlong", lambda config, groups: learned.append(groups) or groups)
    figures = partial.measure_partial(PARTIAL, decoder)
    lengths_S = dataclasses.replace(PARTIAL, num_samples=1000).lengths_S
    for groups in learned:
        assert len(groups) == 3 and all(len(group.samples_G) == 2 for group in groups)
        for group in groups:
            first = 2 * group.prompt.index
            assert [len(s.tokens_T) for s in group.samples_G] == lengths_S[first : first + 2]
    plain, with_partial = learned[:4], learned[4:]
    assert len(with_partial) == 6
    assert [g.prompt.index for groups in plain for g in groups] == list(range(12))
    of_partial = [g.prompt.index for groups in with_partial for g in groups]
    assert len(set(of_partial)) == len(of_partial) == 18
    assert figures["plain_tokens"] == round(sum(lengths_S[6:24]) / 3)
    assert 0 < figures["stale_fraction"] < 1
    own_s = [figures["plain_learn_s"], figures["plain_rollout_s"], figures["partial_learn_s"]]
    assert all(seconds > 0 for seconds in own_s) and figures["ratio"] > 0


def test_what_is_carried_is_read_again_unless_it_is_kept(decoder):
    plain, kept = (
        partial.measure_partial(dataclasses.replace(PARTIAL, learn=False, keep_kv_cache=keeps), decoder)
        for keeps in (False, True)
    )
    assert plain["prefill_tokens"] > 3 * PARTIAL.prompt_tokens >= kept["prefill_tokens"]
    assert plain["carried_gb"] == 0 < kept["prefill_s"] and plain["partial_learn_s"] < 1e-3
