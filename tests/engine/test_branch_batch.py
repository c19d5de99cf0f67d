"""Branches on the pages of finished samples: tokens, reused positions, released pages."""

import pytest
import torch

from engine.parts import EOS, STOPS, branched, drawn, engine_of, packed_logprobs, prompts_of, tokenizer
from models.tiny import tiny
from qerl.cost.cache import page_bytes
from qerl.engine import paged_engine
from qerl.engine.schedule.cache_space import CacheSpace
from qerl.errors import UserError
from qerl.learner.minibatch import after_prefix
from qerl.types import Pivot, Sampling

LENGTHS = (9, 31, 1, 16, 17, 15, 40)
FEW = frozenset({EOS})  # samples get long


@pytest.fixture(scope="module")
def decoder():
    return tiny()


@pytest.fixture
def counted(monkeypatch):
    """The pages of every scheduler that the engine makes."""
    made = []

    class Counted(CacheSpace):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.append(self.pages)

    monkeypatch.setattr(paged_engine, "CacheSpace", Counted)
    return made


def values_of(groups):
    return [(s.tokens_T, s.finish, s.text) for group in groups for s in group.samples_G]


def logprobs(groups):
    return [x for group in groups for s in group.samples_G for x in s.logprobs_T]


def test_the_samples_are_those_of_a_call_without_branches(decoder):
    groups, *_ = branched(engine_of(decoder), prompts_of(*LENGTHS))
    plain = drawn(engine_of(decoder), prompts_of(*LENGTHS))
    assert [s.tokens_T for g in groups for s in g.samples_G] == [s.tokens_T for s in plain]


@pytest.mark.parametrize("settings", [{}, {"block_size": 4}, {"block_size": 1}, {"exact": True}], ids=str)
def test_branches_begin_as_their_sample_and_have_a_fresh_forwards_logprobs(decoder, settings):
    _, branches, found, _ = branched(engine_of(decoder, **settings), prompts_of(*LENGTHS), temperature=0.7)
    assert len(branches) == len(found) > 5
    for group, (parents, pivot) in zip(branches, found, strict=True):
        parent = parents.samples_G[pivot.sample_index]
        assert group.prompt == parents.prompt and group.prefix_tokens == pivot.prefix_tokens
        for sample in group.samples_G:
            n = pivot.prefix_tokens
            assert sample.tokens_T[:n] == parent.tokens_T[:n]
            assert sample.logprobs_T[:n] == parent.logprobs_T[:n]
            assert n < len(sample.tokens_T) <= 12
            assert (sample.finish == "stop") == (sample.tokens_T[-1] in STOPS)
            truth_TV = packed_logprobs(decoder, group.prompt, sample, 0.7)
            truth_T = truth_TV[torch.arange(len(sample.tokens_T)), torch.tensor(sample.tokens_T)]
            assert sample.logprobs_T == pytest.approx(truth_T.tolist(), abs=1e-5)


def test_in_exact_mode_a_branchs_logprobs_are_a_scores_to_the_bit(decoder):
    """Scored as a sample of its prompt, and as one of a prompt that ends at the pivot."""
    engine, sampling = engine_of(decoder, exact=True, max_num_seqs=8), Sampling(max_tokens=12)
    _, branches, _, _ = branched(engine, prompts_of(*LENGTHS))
    assert engine.score(branches, sampling=sampling).tolist() == logprobs(branches)
    suffixes = [after_prefix(group) for group in branches]
    assert engine.score(suffixes, sampling=sampling).tolist() == logprobs(suffixes)


def test_nothing_before_a_pivot_is_computed_again_and_all_pages_come_back(decoder, counted):
    engine = engine_of(decoder, block_size=4)
    groups, branches, found, num_lots = branched(engine, prompts_of(*LENGTHS))
    stats = engine.stats
    assert stats.prefill_tokens == sum(LENGTHS) and stats.prefill_forwards == 1 == num_lots
    own = sum(len(s.tokens_T) - g.prefix_tokens for g in branches for s in g.samples_G)
    assert stats.num_tokens == sum(len(s.tokens_T) for g in groups for s in g.samples_G) + own
    before = [len(group.prompt.tokens_T) + pivot.prefix_tokens - 1 for group, pivot in found]
    assert stats.reused_tokens == sum(before)
    assert [pages.num_used for pages in counted] == [0]


MANY = {"num_branches": 9, "max_tokens": 20}


@pytest.fixture(scope="module")
def plain(decoder):
    return branched(engine_of(decoder, stop_token_ids=FEW), prompts_of(*LENGTHS), **MANY)


@pytest.mark.parametrize("burst_steps", [1, 5])
def test_neither_lots_nor_pauses_change_what_is_drawn(decoder, plain, counted, burst_steps):
    kv_gb = 41.5 * page_bytes(decoder.architecture, 4, torch.float32) / 1e9
    settings = {
        "block_size": 4,
        "kv_cache_gb": kv_gb,
        "decode_steps_per_sync": burst_steps,
        "stop_token_ids": FEW,
    }
    engine = engine_of(decoder, **settings)
    tight = branched(engine, prompts_of(*LENGTHS), **MANY)
    assert tight[3] == len(counted) > 2 and engine.stats.num_preemptions > 0
    for ours, theirs in zip(tight[:2], plain[:2], strict=True):
        assert values_of(ours) == values_of(theirs)
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-5)
    assert engine.stats.peak_pages <= 41 and [pages.num_used for pages in counted] == [0] * len(counted)
    assert engine.stats.reused_tokens == sum(
        len(g.prompt.tokens_T) + p.prefix_tokens - 1 for g, p in plain[2]
    )


def test_a_branch_is_named_by_its_sample_and_its_number(decoder):
    """Fewer branches are the first of more, whatever else is branched; none is another's, nor its parent."""
    prompts_P = prompts_of(9, 9)

    def first(groups):
        return [Pivot(group_index=0, sample_index=1, prefix_tokens=1)]

    def several(groups):
        return [Pivot(group_index=g, sample_index=s, prefix_tokens=1) for g in (1, 0) for s in (2, 1)]

    settings = {"stop_token_ids": frozenset()}
    _, (alone,), _, _ = branched(engine_of(decoder, **settings), prompts_P, num_branches=2, pivots=first)
    groups, among, _, _ = branched(engine_of(decoder, **settings), prompts_P, num_branches=4, pivots=several)
    assert values_of([alone]) == values_of(among)[12:14]
    seen = {tuple(s.tokens_T[1:]) for g in (*groups, *among) for s in g.samples_G}
    assert len(seen) == 2 * 3 + 4 * 4
    for changed in ({"step": 3}, {"seed": 6}):
        _, others, _, _ = branched(
            engine_of(decoder, **settings), prompts_P, num_branches=4, pivots=several, **changed
        )
        assert not seen & {tuple(s.tokens_T[1:]) for g in others for s in g.samples_G}


def test_a_stop_string_across_the_pivot_ends_a_branch(decoder):
    """Its first two letters are the sample's, its third the branch's own."""
    n = 6

    def halfway(groups):
        return [Pivot(group_index=0, sample_index=0, prefix_tokens=n)]

    engine = engine_of(decoder, stop_token_ids=frozenset())
    _, (free,), _, _ = branched(engine, prompts_of(9), num_branches=8, pivots=halfway)
    letters = tokenizer().decode(free.samples_G[3].tokens_T[n - 2 : n + 1])
    assert len(letters) >= 3 and all(letters not in s.text[: n + 1] for s in free.samples_G[:3])
    groups, (cut,), _, _ = branched(engine, prompts_of(9), num_branches=8, pivots=halfway, stop=(letters,))
    assert len(groups[0].samples_G[0].tokens_T) == 12 == len(cut.samples_G[0].tokens_T)
    assert len(cut.samples_G[3].tokens_T) == n + 1 and cut.samples_G[3].finish == "stop"
    assert not cut.samples_G[3].text.endswith(letters)


def test_a_lot_of_one_prompt_that_does_not_fit_is_the_users_to_mend(decoder):
    kv_gb = 8.5 * page_bytes(decoder.architecture, 4, torch.float32) / 1e9
    engine = engine_of(decoder, block_size=4, kv_cache_gb=kv_gb)
    with pytest.raises(UserError, match=r"its 9 tokens and 3 samples and a branch of 12; engine.kv_cache_gb"):
        branched(engine, prompts_of(9))
