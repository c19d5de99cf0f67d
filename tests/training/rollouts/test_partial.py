"""Partial rollouts: every sample is learned from once, bit for bit what it is without, and a kill changes
nothing."""

import collections
import contextlib
import dataclasses
import itertools
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.parts import engine_of, prompts_of
from models.tiny import tiny
from qerl.config import (
    AlgoConfig,
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    NoiseConfig,
    RolloutConfig,
    RunConfig,
    SampleConfig,
)
from qerl.cost.cache import page_bytes
from qerl.errors import UserError
from qerl.learner.distributed import ALONE, Ranks
from qerl.training.rollouts.partial import PartialRollouts
from qerl.training.rollouts.rollout import GroupRollouts
from training.test_session import files, goes_on

assert files  # a fixture

STEPS, P, G = 6, 3, 3
CONFIG = RunConfig(
    num_steps=STEPS,
    num_prompts=P,
    num_generations=G,
    sample=SampleConfig(max_tokens=24),
    noise=NoiseConfig(schedule="none"),
    evaluate=EvalConfig(success_threshold=1.0),
    rollout=RolloutConfig(partial=True, extra_prompts=2, max_staleness=2),
)


def train_prompts(step, num_prompts, round=0):
    lengths = [3 + (7 * step + 5 * i) % 11 for i in range(num_prompts)]
    return prompts_of(*lengths, first_index=step * num_prompts)


class Rewards:
    environments = ()

    def score(self, groups):
        return [[float(s.tokens_T[-1] % 2) for s in group.samples_G] for group in groups]


class Log:
    def __init__(self):
        self.metrics = {}

    def add(self, **metrics):
        self.metrics |= metrics

    def span(self, name):
        return contextlib.nullcontext()


@pytest.fixture(scope="module")
def decoder():
    return tiny()


def sampled(rollouts, engine, steps, *, publishes=True):
    """[(groups, metrics)] of these steps, after each of which the version rises."""
    found = []
    for step in steps:
        log = Log()
        found.append((rollouts.sample(step, log), log.metrics))
        if publishes:
            engine.publish(step + 1)
    return found


def partial_of(decoder, config=CONFIG, ranks=ALONE, **settings):
    engine = engine_of(decoder, max_num_seqs=6, stop_token_ids=frozenset({0, 1}), **settings)
    return PartialRollouts(config, engine, Rewards(), train_prompts, ranks), engine


@pytest.fixture(scope="module")
def unbroken(decoder):
    """All steps of one run."""
    return sampled(*partial_of(decoder), range(STEPS))


def drawn(steps):
    """{(prompt, sample): (tokens, logprobs)}; a sample that comes twice is an error."""
    samples = [(g.prompt.index, s) for groups, _ in steps for g in groups for s in g.samples_G]
    found = {(index, s.sample_index): (s.tokens_T, s.logprobs_T, s.finish, s.text) for index, s in samples}
    assert len(found) == len(samples)
    return found


def test_under_one_policy_the_run_learns_from_the_samples_that_it_has_without(decoder, unbroken):
    """None is lost or comes twice, though they are learned from in other steps."""
    engine, steps = engine_of(decoder, max_num_seqs=6, stop_token_ids=frozenset({0, 1})), unbroken
    whole = sampled(GroupRollouts(CONFIG, engine, Rewards(), train_prompts), engine, range(STEPS))
    ours, theirs = drawn(steps), drawn(whole)
    assert ours.keys() == theirs.keys() and len(ours) == STEPS * P * G
    for key, (tokens_T, logprobs_T, *rest) in theirs.items():
        assert ours[key][0] == tokens_T and list(ours[key][2:]) == rest
        assert ours[key][1] == pytest.approx(logprobs_T, abs=1e-4)
    assert [len(groups) for groups, _ in steps] == [P] * STEPS
    assert [[g.prompt.index for g in groups] for groups, _ in steps] != [
        [g.prompt.index for g in groups] for groups, _ in whole
    ]
    assert sum(m["carried_samples"] for _, m in steps) > 5 and steps[-1][1]["carried_samples"] == 0
    assert all(a["carried_samples"] == b["resumed_samples"] for (_, a), (_, b) in itertools.pairwise(steps))


def test_every_token_keeps_the_version_that_sampled_it(unbroken):
    several = 0
    for step, (groups, measured) in enumerate(unbroken):
        ages = []
        for s in (s for group in groups for s in group.samples_G):
            spans = s.versions or ((s.version, len(s.tokens_T)),)
            assert sum(count for _, count in spans) == len(s.tokens_T) == len(s.logprobs_T)
            assert s.version == spans[-1][0] and list(spans) == sorted(set(spans))
            assert step - CONFIG.rollout.max_staleness <= spans[0][0] <= spans[-1][0] <= step
            ages += [step - version for version, count in spans for _ in range(count)]
            several += len(spans) > 1
        assert measured["staleness"] == pytest.approx(sum(ages) / len(ages))
    assert several > 3


def test_a_step_counts_the_tokens_that_it_sampled(unbroken):
    """And not those of samples that it takes over; the version is the step."""
    counts = collections.Counter()
    for s in (s for groups, _ in unbroken for group in groups for s in group.samples_G):
        counts.update(dict(s.versions or ((s.version, len(s.tokens_T)),)))
    assert {step: m["sampled_tokens"] for step, (_, m) in enumerate(unbroken)} == counts


def test_a_step_waits_for_what_is_as_old_as_max_staleness(decoder):
    """With 1 it learns from no token of the version before the previous one, with 2 it does."""
    oldest = {}
    for most in (1, 2):
        rollout = RolloutConfig(partial=True, extra_prompts=3, max_staleness=most)
        rollouts, engine = partial_of(decoder, dataclasses.replace(CONFIG, rollout=rollout))
        oldest[most] = 0
        for step, (groups, _) in enumerate(sampled(rollouts, engine, range(STEPS))):
            assert len(groups) == P
            ages = [step - first_version(s) for group in groups for s in group.samples_G]
            oldest[most] = max(oldest[most], *ages)
    assert oldest == {1: 1, 2: 2}


class Together(Ranks):
    """A rank that is a thread: `gather` waits for the others."""

    def __init__(self, index, barrier, values):
        super().__init__(index, barrier.parties)
        self.barrier, self.values = barrier, values

    def gather(self, value):
        self.values[self.index] = pickle.dumps(value)
        self.barrier.wait(60)
        found = list(map(pickle.loads, self.values))
        self.barrier.wait(60)
        return found


def two_ranks(steps, states=(None, None), config=CONFIG):
    """[(rollouts, its steps)] of two ranks, begun with these states."""
    barrier, values = threading.Barrier(2), [None, None]
    made = [partial_of(tiny(), config, Together(index, barrier, values)) for index in range(2)]

    def run(index):
        rollouts, engine = made[index]
        if states[index] is not None:
            rollouts.load(json.loads(json.dumps(states[index])))
        engine.publish(steps.start)
        return rollouts, sampled(rollouts, engine, steps)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_two_ranks_learn_from_every_sample_once_and_go_on_with_what_they_carry(decoder):
    """Under one policy the samples are those of the run without. Of 3 prompts and 2 more, 2 + 1 and 1 + 1."""
    (_, ours), (_, theirs) = two_ranks(range(STEPS))
    assert ours == theirs and [len(groups) for groups, _ in ours] == [P] * STEPS
    engine = engine_of(decoder, max_num_seqs=6, stop_token_ids=frozenset({0, 1}))
    whole = drawn(sampled(GroupRollouts(CONFIG, engine, Rewards(), train_prompts), engine, range(STEPS)))
    found = drawn(ours)
    assert {key: (tokens_T, *rest) for key, (tokens_T, _, *rest) in found.items()} == {
        key: (tokens_T, *rest) for key, (tokens_T, _, *rest) in whole.items()
    }
    places = [{g.prompt.index % P % 2 for g in groups} for groups, _ in ours]
    assert places == [{0, 1}] * STEPS
    assert ours[2][1]["carried_samples"] > 0 and ours[-1][1]["carried_samples"] == 0
    broken = two_ranks(range(3))
    states = [rollouts.state() for rollouts, _ in broken]
    assert states[0] == states[1] and broken[0][1] == ours[:3]
    assert two_ranks(range(3, STEPS), states)[1][1] == ours[3:]
    alone, _ = partial_of(decoder)
    with pytest.raises(UserError, match="continue it with 2, not 1"):
        alone.load(states[0])


KEEPS = dataclasses.replace(
    CONFIG,
    rollout=dataclasses.replace(CONFIG.rollout, keep_kv_cache=True),
    checkpoint=CheckpointConfig(every=3),
)


def under_new_weights(rollouts, engine, decoder, steps):
    """The steps, each with other weights of the norms."""
    norms = [x for name, x in decoder.named_buffers() if "norm" in name and not name.endswith("noise")]
    first, found = [x.clone() for x in norms], []
    for step in steps:
        for x, was in zip(norms, first, strict=True):
            x.copy_(was * (1 + 0.1 * step))
        found += sampled(rollouts, engine, [step])
    for x, was in zip(norms, first, strict=True):
        x.copy_(was)
    return found


def test_caches_are_kept_but_not_over_a_checkpoint_from_which_a_run_goes_on_alike():
    decoder = tiny()
    rollouts, engine = partial_of(decoder, KEEPS)
    whole = under_new_weights(rollouts, engine, decoder, range(3))
    state = json.loads(json.dumps(rollouts.state()))
    whole += under_new_weights(rollouts, engine, decoder, range(3, STEPS))
    again, engine = partial_of(decoder, KEEPS)
    again.load(state)
    engine.publish(3)
    assert under_new_weights(again, engine, decoder, range(3, STEPS)) == whole[3:]
    reused = [m["reused_tokens"] for _, m in whole]
    assert reused[0] == reused[3] == 0 and min(reused[1], reused[2], reused[4]) > 0
    assert [m["carried_gb"] > 0 for _, m in whole] == [True, True, False, True, True, False]
    without = under_new_weights(*partial_of(decoder), decoder, range(STEPS))
    assert drawn(without) != drawn(whole) and "carried_gb" not in without[0][1]
    assert sum(m["prefill_tokens"] for _, m in without) > sum(m["prefill_tokens"] for _, m in whole)


def test_each_rank_keeps_what_its_own_cache_held(decoder):
    ranks, ((_, without), _) = two_ranks(range(4), config=KEEPS), two_ranks(range(4))
    for index, (rollouts, steps) in enumerate(ranks):
        assert [groups for groups, _ in steps] == [groups for groups, _ in ranks[0][1]]
        mine, others = drawn(steps), drawn(without)
        assert {key: s[0] for key, s in mine.items()} == {key: s[0] for key, s in others.items()}
        assert max(m["reused_tokens"] for _, m in steps) > 0 < max(m["carried_gb"] for _, m in steps)
        held = [number for number, _, begun in rollouts._carried if begun.cache_bytes]
        assert all(number % P % 2 == index for number in held)


def first_version(sample):
    return sample.versions[0][0] if sample.versions else sample.version


@pytest.mark.parametrize("at", [1, 3])
def test_a_state_that_is_stored_and_read_goes_on_alike(decoder, unbroken, at):
    rollouts, engine = partial_of(decoder)
    before = sampled(rollouts, engine, range(at))
    stored = json.dumps(rollouts.state())
    again, engine = partial_of(decoder)
    again.load(json.loads(stored))
    engine.publish(at)
    assert sampled(again, engine, range(at, STEPS)) == unbroken[at:]
    assert before[-1][1]["carried_samples"] > 0


def test_little_memory_preempts_and_changes_nothing(decoder, unbroken):
    """A resumed sample is admitted, and preempted, as any other one."""
    kv_gb = 24.5 * page_bytes(decoder.architecture, 4, torch.float32) / 1e9
    scarce, small = partial_of(decoder, block_size=4, kv_cache_gb=kv_gb)
    num_preemptions, ours = 0, []
    for step in range(STEPS):
        ours += sampled(scarce, small, [step])
        num_preemptions += small.stats.num_preemptions
    assert num_preemptions > 0
    mine, others = drawn(ours), drawn(unbroken)
    assert {key: found[0] for key, found in mine.items()} == {key: found[0] for key, found in others.items()}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algo": AlgoConfig(importance="none")}, "algo.importance none"),
        ({"algo": AlgoConfig(dynamic_sampling=True)}, "algo.dynamic_sampling"),
        ({"noise": NoiseConfig(scope="sample")}, "noise.scope sample"),
        ({"rollout": RolloutConfig(partial=True, extra_prompts=9)}, "must not exceed num_prompts .*, got 9$"),
        ({"rollout": RolloutConfig(partial=True)}, "must not exceed num_prompts .*, got its default, 8$"),
        ({"rollout": KEEPS.rollout, "engine": EngineConfig(exact=True)}, "not work with engine.exact"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(CONFIG, **settings)


@pytest.mark.parametrize("keeps", [(), ("--rollout.keep-kv-cache",)], ids=["computed again", "kept"])
def test_killed_and_started_again_a_partial_run_is_the_unbroken_one(files, tmp_path, keeps):
    given = ("--rollout.partial", "--rollout.extra-prompts", "3", "--engine.max-num-seqs", "6", *keeps)
    given += ("--task.reward-overlap", "always")
    steps = goes_on(files, tmp_path, *given, recipe="demo_long")
    assert sum(step["carried_samples"] for step in steps) > 0 and steps[-1]["carried_samples"] == 0
    assert max(step["staleness"] for step in steps) > 0
    assert any(step.get("reused_tokens", 0) for step in steps) == bool(keeps)
