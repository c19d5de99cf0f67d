"""Data-parallel sampling and rewards: each rank does its share, and every rank gets all results.

    prompt i of a call    is sampled and scored by rank i mod count

Random numbers follow from (seed, step, prompt, sample), so it does not matter which rank samples. Ranks
exchange 12 bytes per token and each sample's text. Every rank then computes the same advantages and metrics,
and learning is balanced by the samples' lengths. Tests: tests/training/test_distributed.py.
"""

import dataclasses
import functools
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

from qerl.engine.stats import Stats
from qerl.learner.distributed import Ranks
from qerl.tasks import RewardPool
from qerl.tasks.reward import Scoring
from qerl.tasks.reward_means import reward_means
from qerl.training.engines.replayed_batch import Branchable, BranchingEngine
from qerl.types import GenerateRequest, Group, OnBurst, Pivot, Prompt, RolloutEngine, Sample, UnfinishedSample


class DataParallelEngine:
    def __init__(self, engine: RolloutEngine, ranks: Ranks):
        self._engine, self._ranks = engine, ranks
        self.stats = Stats()
        """Sum over all ranks, of the latest call of branch_batches."""

    def generate(self, request: GenerateRequest, *, on_burst: OnBurst | None = None) -> list[Group]:
        share, ranks = self._share(request), self._ranks
        on_share_burst = None if on_burst is None else functools.partial(self._notify, on_burst)
        groups_P = self._engine.generate(share, on_burst=on_share_burst)
        if ranks.count == 1:
            return groups_P
        gathered = ranks.interleave(ranks.gather(_packed_groups(share.prompts_P, groups_P)))
        return [_unpacked_group(*pair) for pair in zip(request.prompts_P, gathered, strict=True)]

    def branch_batches(self, request: GenerateRequest) -> "Iterator[DataParallelBatch]":
        """Yield batches that each consist of the next batch of every rank that has one."""
        engine, ranks, share, num_done = self._engine, self._ranks, self._share(request), 0
        assert isinstance(engine, BranchingEngine)  # check_supported
        has_share = bool(share.prompts_P)
        batches = engine.branch_batches(share) if has_share else iter(())
        while any(ranks.gather((of_rank := next(batches, None)) is not None)):
            batch = DataParallelBatch(of_rank, ranks, request.prompts_P, num_done)
            yield batch
            num_done += batch.num_sampled
        self.stats = sum(ranks.gather(engine.stats if has_share else Stats()), Stats())

    def _share(self, request: GenerateRequest) -> GenerateRequest:
        return request.with_prompts(self._ranks.share(request.prompts_P))

    def _notify(self, on_burst: OnBurst, ended: list[tuple[int, Group]]) -> None:
        """Notify of this rank's groups by their indices among those of all ranks."""
        on_burst([(self._ranks.index + i * self._ranks.count, group) for i, group in ended])

    def publish(self, version: int) -> None:
        self._engine.publish(version)

    def take_metrics(self) -> dict[str, float]:
        return self._engine.take_metrics()


class DataParallelBatch:
    """A sample is branched by the rank that sampled it, which has its pages and its history."""

    def __init__(self, batch: Branchable | None, ranks: Ranks, prompts_P: list[Prompt], num_done: int):
        """batch: None if this rank has no prompts left. num_done: its prompts in earlier batches."""
        self._batch, self._ranks, self._prompts_P = batch, ranks, prompts_P
        self._num_done, self.num_sampled = num_done, 0
        self._groups_P: list[Group] = []
        self._owners_P: list[tuple[int, int]] = []
        """The rank of each group, and the group's index there."""

    def sample(self) -> list[Group]:
        ranks, groups_P = self._ranks, [] if self._batch is None else self._batch.sample()
        self.num_sampled = len(groups_P)
        places = ranks.share(list(range(len(self._prompts_P))))[self._num_done :][: self.num_sampled]
        packed_P = _packed_groups([self._prompts_P[place] for place in places], groups_P)
        of_ranks = ranks.gather(list(zip(places, packed_P, strict=True)))
        ordered = sorted(  # by place, of which each occurs once
            (place, rank, index, each)
            for rank, of_rank in enumerate(of_ranks)
            for index, (place, each) in enumerate(of_rank)
        )
        self._owners_P = [(rank, index) for _, rank, index, _ in ordered]
        self._groups_P = [_unpacked_group(self._prompts_P[place], each) for place, _, _, each in ordered]
        return self._groups_P

    def branch(self, pivots: list[Pivot], num_branches: int) -> list[Group]:
        owners = [self._owners_P[pivot.group_index] for pivot in pivots]
        of_rank = [
            dataclasses.replace(pivot, group_index=index)
            for pivot, (rank, index) in zip(pivots, owners, strict=True)
            if rank == self._ranks.index
        ]
        branches = [] if self._batch is None else self._batch.branch(of_rank, num_branches)
        of_ranks = self._ranks.gather([[packed(sample) for sample in group.samples_G] for group in branches])
        left = [iter(of_rank) for of_rank in of_ranks]
        return [
            Group(
                prompt=self._groups_P[pivot.group_index].prompt,
                samples_G=[unpacked(sample) for sample in next(left[rank])],
                prefix_tokens=pivot.prefix_tokens,
            )
            for pivot, (rank, _) in zip(pivots, owners, strict=True)
        ]


class DataParallelRewards:
    def __init__(self, pool: RewardPool, ranks: Ranks):
        self._pool, self._ranks = pool, ranks

    @property
    def environments(self) -> tuple[str, ...]:
        return self._pool.environments

    def attempt(self, groups: list[Group]) -> list[list[float | None]]:
        return self._ranks.interleave(self._ranks.gather(self._pool.attempt(self._ranks.share(groups))))

    def begin(self) -> "DataParallelScoring":
        return DataParallelScoring(self._pool.begin(), self._ranks)

    def check_some(self, rewards_P_G: list[list[float | None]]) -> None:
        self._pool.check_some(rewards_P_G)

    def score(self, groups: list[Group]) -> list[list[float | None]]:
        """Raise UserError if no sample on any rank got a reward."""
        rewards_P_G = self.attempt(groups)
        self.check_some(rewards_P_G)
        return rewards_P_G

    def take_means(self) -> dict[str, float]:
        """Return RewardPool's metrics over all ranks."""
        counts = Counter[str]()
        for each in self._ranks.gather(self._pool.take_counts()):
            counts.update(each)  # unlike a sum it keeps what is 0
        return reward_means(self._ranks.gather(self._pool.take_sums())) | dict(counts)

    def take_failures(self) -> dict[str, tuple[int, str]]:
        """Return RewardPool's failures over all ranks, each with the first rank's example."""
        taken: dict[str, tuple[int, str]] = {}
        for failures in self._ranks.gather(self._pool.take_failures()):
            for cause, (count, example) in failures.items():
                before, first = taken.get(cause, (0, example))
                taken[cause] = (before + count, first)
        return taken


class DataParallelScoring:
    """A Scoring of each rank: it scores the groups that were added while the rank sampled, and its share of
    the groups that no rank has added."""

    def __init__(self, scoring: Scoring, ranks: Ranks):
        self._scoring, self._ranks = scoring, ranks
        self._added: set[int] = set()

    @property
    def busy_s(self) -> float:
        return self._scoring.busy_s

    def add(self, key: int, group: Group) -> None:
        self._added.add(key)
        self._scoring.add(key, group)

    def poll(self) -> None:
        self._scoring.poll()

    def rewards(self, keyed_P: list[tuple[int, Group]]) -> list[list[float | None]]:
        added = set().union(*self._ranks.gather(self._added))
        share = [pair for pair in keyed_P if pair[0] in self._added]
        share += self._ranks.share([pair for pair in keyed_P if pair[0] not in added])
        by_key = dict(zip((key for key, _ in share), self._scoring.rewards(share), strict=True))
        merged = {key: rewards_G for each in self._ranks.gather(by_key) for key, rewards_G in each.items()}
        return [merged[key] for key, _ in keyed_P]


def _packed_groups(prompts_P: list[Prompt], groups_P: list[Group]) -> list[tuple[Prompt | None, list[Any]]]:
    """Return what other ranks do not know of the groups: the samples, and a prompt that an environment has
    extended."""
    return [
        (None if group.prompt is prompt else group.prompt, [packed(sample) for sample in group.samples_G])
        for prompt, group in zip(prompts_P, groups_P, strict=True)
    ]


def _unpacked_group(prompt: Prompt, gathered: tuple[Prompt | None, list[Any]]) -> Group:
    opened, packed_G = gathered
    return Group(prompt=opened or prompt, samples_G=[unpacked(sample) for sample in packed_G])


def packed(sample: Sample | UnfinishedSample) -> Any:
    """Return the sample with arrays, which pickle to a third of the bytes of lists, and much faster."""
    tokens_T, logprobs_T = array("i", sample.tokens_T), array("d", sample.logprobs_T)
    return dataclasses.replace(sample, tokens_T=tokens_T, logprobs_T=logprobs_T)


def unpacked(sample: Any) -> Any:
    """Return a Sample or UnfinishedSample with lists again."""
    tokens_T, logprobs_T = sample.tokens_T.tolist(), sample.logprobs_T.tolist()
    return dataclasses.replace(sample, tokens_T=tokens_T, logprobs_T=logprobs_T)
