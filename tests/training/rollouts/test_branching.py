"""DEEP-GRPO's step by hand: which samples are branched, how branches compare, what they add to the loss."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from learner.samples import prompt, random_groups, sample
from learner.tiny import VOCAB, run_config, tiny_learner
from qerl.algo.pivot import Success
from qerl.config import AlgoConfig, DeepConfig, EvalConfig, RunConfig, SampleConfig
from qerl.engine.stats import Stats
from qerl.errors import UserError
from qerl.learner.minibatch import after_prefix, split
from qerl.training.rollouts.branching import BranchingRollouts
from qerl.training.rollouts.rollout import with_advantages
from qerl.types import Group

DEEP = DeepConfig(num_branches=2, segment_tokens=1, weight=0.5)
CONFIG = RunConfig(
    num_prompts=2,
    num_generations=3,
    sample=SampleConfig(max_tokens=8),
    algo=AlgoConfig(advantage="mean", loss_type="grpo", branching="deep", deep=DEEP),
    evaluate=EvalConfig(success_threshold=1.0),
)


class FakeEngine:
    """An engine: samples are [0, 1, 2, 3], branches go on with their own number; each prompt is a lot."""

    def __init__(self):
        self.stats, self.pivots = Stats(), []

    def branch_batches(self, request):
        for each in request.prompts_P:
            group = Group(prompt=each, samples_G=[sample([0, 1, 2, 3], reward=None)] * request.num_samples)
            yield SimpleNamespace(
                sample=lambda group=group: [group],
                branch=lambda pivots, num, group=group: [self._branches(group, p, num) for p in pivots],
            )

    def _branches(self, group, pivot, num_branches):
        self.pivots.append((group.prompt.index, pivot.sample_index, pivot.prefix_tokens))
        tokens_T, n = group.samples_G[pivot.sample_index].tokens_T, pivot.prefix_tokens
        grown = [sample([*tokens_T[:n], b], reward=None) for b in range(num_branches)]
        return Group(prompt=group.prompt, samples_G=grown, prefix_tokens=n)


class Rewards:
    """Rewards of prompt 0's samples: 0, 0.5, failed; of prompt 1's: 0 each; a branch has its own number."""

    environments = ()

    def attempt(self, groups):
        firsts = {0: [0.0, 0.5, None], 1: [0.0, -1.0, 0.0]}
        return [
            [float(s.tokens_T[-1]) for s in g.samples_G] if g.prefix_tokens else firsts[g.prompt.index]
            for g in groups
        ]

    def check_some(self, rewards_P_G):
        if all(reward is None for rewards_G in rewards_P_G for reward in rewards_G):
            raise UserError("no reward")


class NoneOfBranches(Rewards):
    def attempt(self, groups):
        return [
            [None] * len(g.samples_G) if g.prefix_tokens else r
            for g, r in zip(groups, super().attempt(groups), strict=True)
        ]


class NoneOfPrompts(Rewards):
    def __init__(self, *indices):
        self.indices = indices

    def attempt(self, groups):
        rewards_P_G = super().attempt(groups)
        return [
            [None] * len(r) if g.prompt.index in self.indices else r
            for g, r in zip(groups, rewards_P_G, strict=True)
        ]


def rollouts_of(engine, config=CONFIG, rewards=None):
    def train_prompts(step, num_prompts, round):
        return [prompt(i, [7, 8]) for i in range(num_prompts)]

    return BranchingRollouts(config, engine, rewards or Rewards(), train_prompts)


def drawn(branching, step=0):
    metrics = {}
    log = SimpleNamespace(span=lambda name: contextlib.nullcontext(), add=lambda **new: metrics.update(new))
    groups = branching.sample(step, log)
    return groups, metrics


def test_what_failed_is_branched_once_and_branches_compare_with_their_siblings():
    engine = FakeEngine()
    groups, metrics = drawn(rollouts_of(engine, CONFIG))
    assert [(p, s) for p, s, _ in engine.pivots] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert all(1 <= n <= 3 for *_, n in engine.pivots)
    samples, branches = groups[:2], groups[2:]
    assert [g.prefix_tokens for g in groups] == [0, 0, *(n for *_, n in engine.pivots)]
    assert [s.advantage for s in samples[0].samples_G] == [-0.25, 0.25, 0.0]
    assert [s.advantage for s in samples[1].samples_G] == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert [[s.advantage for s in g.samples_G] for g in branches] == [[-0.5, 0.5]] * 4
    ratio = sum(n for *_, n in engine.pivots) / 16
    expected = {
        "pivots": 4,
        "branches": 8,
        "branch_accuracy": 0.5,
        "pivot_success": 1.0,
        "pivot_ratio": ratio,
    }
    assert expected.items() <= metrics.items()
    assert metrics["reward"] == pytest.approx(-0.5 / 5) and "pivot_slope" not in metrics


def test_a_lot_without_any_reward_does_not_end_the_run_and_a_step_without_does():
    groups, metrics = drawn(rollouts_of(FakeEngine(), CONFIG, NoneOfPrompts(0)))
    assert [g.prompt.index for g in groups] == [0, 1, 1, 1, 1] and metrics["pivots"] == 3
    with pytest.raises(UserError, match="no reward"):
        drawn(rollouts_of(FakeEngine(), CONFIG, NoneOfPrompts(0, 1)))


def test_branches_without_any_reward_do_not_end_the_run():
    groups, metrics = drawn(rollouts_of(FakeEngine(), CONFIG, NoneOfBranches()))
    assert {s.reward for g in groups[2:] for s in g.samples_G} == {None}
    assert metrics["branches"] == 8 and "branch_accuracy" not in metrics
    (share,) = split(groups, CONFIG, device=torch.device("cpu"))
    assert share.num_samples == 2 + 3 and len(share.with_gradient.batches(1000)) == 1


def test_a_pivots_place_is_named_by_seed_step_prompt_and_sample():
    def places(**changed):
        engine, config = FakeEngine(), replace(CONFIG, **{"seed": 0, **changed})
        branching = rollouts_of(engine, config)
        for step in range(5):
            drawn(branching, step)
        return engine.pivots

    assert places() == places() != places(seed=1)
    by_step = [places()[4 * i : 4 * i + 4] for i in range(5)]
    assert len(set(map(tuple, by_step))) > 1


def test_tries_steer_later_steps_and_survive_a_checkpoint():
    """Pivots after one token of four never succeeded and those after three always did."""
    one, other, engine = rollouts_of(FakeEngine(), CONFIG), rollouts_of(FakeEngine(), CONFIG), FakeEngine()
    one.load([[0.25, 0.0], [0.75, 1.0]] * 500)
    third = rollouts_of(engine, CONFIG)
    third.load(one.state())
    assert third.state() == one.state() != other.state()
    for step in range(20):
        _, metrics = drawn(third, step=step)
    assert metrics["pivot_slope"] > 5 and len(third.state()) == 1080
    success = Success(metrics["pivot_slope"], metrics["pivot_base"])
    assert success.at(0.25) < 0.2 and success.at(0.75) > 0.8
    assert {n for *_, n in engine.pivots} <= {1, 2, 3}
    assert sum(n == 1 for *_, n in engine.pivots) < 4 < sum(n == 3 for *_, n in engine.pivots)


def grown(num_groups, rng):
    """Branches of two, after one token of a sample."""
    groups = []
    for group in random_groups(num_groups, 2, vocab=VOCAB, rng=rng):
        longer = [
            replace(s, tokens_T=[5, *s.tokens_T], logprobs_T=[-9.0, *s.logprobs_T]) for s in group.samples_G
        ]
        groups.append(replace(group, samples_G=longer, prefix_tokens=1))
    return groups


def test_a_branch_token_weighs_as_in_a_loss_of_branches_times_the_weight():
    """GRPO: 1 / (S |o|). 2 prompts of 3 samples: 1 / (6 |o|); 1 pivot of 2 branches: 0.5 / (2 |o|), |o| from
    the pivot on."""
    plain = [Group(prompt=prompt(i, [1]), samples_G=[sample([2] * n) for n in (1, 2, 4)]) for i in range(2)]
    branches = Group(prompt=prompt(1, [1]), samples_G=[sample([2] * 3), sample([2] * 7)], prefix_tokens=2)
    (share,) = split([*plain, branches], CONFIG, device=torch.device("cpu"))
    (batch,) = share.with_gradient.batches(1000)
    assert batch.weights_C.tolist() == pytest.approx(
        2 * [1 / 6, *[1 / 12] * 2, *[1 / 24] * 4] + [0.25] + 5 * [0.05]
    )
    assert batch.sampler_logprobs_C[-6:].tolist() == [-1.25, *(-1.25 - 0.125 * i for i in range(5))]
    assert batch.trees[2].prompt_tokens == 3 and batch.trees[2].branch_tokens == (0, 4)
    assert batch.positions_T[-4:].tolist() == [3, 4, 5, 6]
    assert share.num_samples == 8


def test_the_loss_is_the_samples_plus_the_weighted_branches(rng):
    """At ratio 1 a sample's loss is -A, GRPO's the mean: -(1 + 0 - 0.4) / 3 - 0.5 (-(0.6 - 0.2) / 2)."""
    group = random_groups(1, 3, vocab=VOCAB, rng=rng)[0]
    (branches,) = grown(1, rng)
    group, branches = (
        replace(g, samples_G=[replace(s, advantage=a) for s, a in zip(g.samples_G, given, strict=True)])
        for g, given in ((group, (1.0, 0.0, -0.4)), (branches, (0.6, -0.2)))
    )
    algo = {"loss_type": "grpo", "importance": "none", "deep": DEEP}
    metrics = tiny_learner(algo).step([group, branches])
    assert metrics["loss"] == pytest.approx(-0.6 / 3 - 0.5 * 0.4 / 2, abs=1e-6)


def gradient(groups, deep, num_samples):
    algo = {"loss_type": "dapo", "deep": deep}
    learner = tiny_learner(algo, {"max_grad_norm": 1e9}, num_generations=num_samples)
    learner.step(groups)
    beta, moments = learner.config.learn.betas[0], learner.optimizer_state()
    return torch.cat(
        [m.flatten() / (1 - beta) for name, m in sorted(moments.items()) if "exp_avg." in name + "."]
    )


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_gradient_is_that_of_prompts_which_end_at_the_pivots(rng, weight):
    plain, branches = random_groups(3, 3, vocab=VOCAB, rng=rng), grown(4, rng)
    deep = replace(DEEP, weight=weight)
    both = gradient(plain + branches, deep, 3)
    parts = gradient(plain, deep, 3) + weight * gradient([after_prefix(g) for g in branches], deep, 2)
    assert both.abs().max() > 0.01 and torch.allclose(both, parts, atol=1e-6)


def test_each_update_has_its_share_of_samples_and_of_branches(rng):
    groups = random_groups(4, 3, vocab=VOCAB, rng=rng) + grown(8, rng)
    shares = split(groups, run_config({"deep": DEEP}, {"updates_per_step": 4}), device=torch.device("cpu"))
    assert [share.num_samples for share in shares] == [3 + 4] * 4


def test_equal_rewards_of_all_branches_teach_nothing():
    group = Group(prompt=prompt(0, [1]), samples_G=[sample([1, 2]), sample([1, 3])], prefix_tokens=1)
    (silent,) = with_advantages(CONFIG.algo, CONFIG.sample, [group], [[0.0, 0.0]])
    assert [s.advantage for s in silent.samples_G] == [0.0, 0.0]
