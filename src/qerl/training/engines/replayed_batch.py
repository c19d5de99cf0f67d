"""Samples, and then branches of them, by engines that play a sample's beginning again.

    an environment      is reset and gets the recorded answers; their tokens are the branch's prompt
    an agent            runs anew and is given the recorded answers (serve/agents/replay.py)
    a Ray worker        may be another one than sampled: the tokens before the pivot are its prompt

What an engine needs for it is the history of each sample, which it returns with the samples. It may travel.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from qerl.algo.seeds import mix
from qerl.engine.local_engine import LocalEngine
from qerl.engine.stats import Stats
from qerl.types import GenerateRequest, Group, OnBurst, Pivot, Prompt, RolloutEngine, Sample

_BRANCH = 7  # keeps these seeds apart from those of other tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """A sample to be branched after its first prefix_tokens tokens."""

    row: Prompt
    """The prompt as the task has it."""
    prompt: Prompt
    """The same, with what an environment added to it."""
    sample: Sample
    history: Any
    prefix_tokens: int


HistoriesPG = list[list[Any]]


class Branchable(Protocol):
    """Samples of some prompts, and then branches of them."""

    def sample(self) -> list[Group]: ...

    def branch(self, pivots: list[Pivot], num_branches: int) -> list[Group]: ...


@runtime_checkable
class BranchingEngine(Protocol):
    """An engine that can branch its samples: single turns, environments, agents, ranks, Ray."""

    stats: Stats
    """Sum over all batches, after branch_batches."""

    def branch_batches(self, request: GenerateRequest) -> Iterator[Branchable]:
        """Yield batches that together have the samples of all prompts."""
        ...


class ReplayingEngine(RolloutEngine, Protocol):
    """An engine that can branch samples that any engine of its kind has made."""

    stats: Stats
    """Stats of the latest call."""

    def sample(self, request: GenerateRequest) -> tuple[list[Group], HistoriesPG]:
        """Return the samples of each prompt, and the history of each sample."""
        ...

    def branch(
        self, parents: list[Parent], num_branches: int, request: GenerateRequest
    ) -> list[list[Sample]]:
        """Return num_branches samples for each parent. request: the parents', whose prompts are not read."""
        ...

    def generate(self, request: GenerateRequest, *, on_burst: OnBurst | None = None) -> list[Group]:
        """Return the samples of each prompt; none of them will be branched. on_burst is not called: a sample
        is complete only when its episode has ended."""
        return self.sample(request)[0]

    def branch_batches(self, request: GenerateRequest) -> "Iterator[ReplayedBatch]":
        """Yield one batch of all prompts. See LocalEngine.branch_batches."""
        batch = ReplayedBatch(self, request)
        yield batch
        self.stats = batch.stats


class ReplayedBatch:
    """Call `sample` once, then `branch` once: see BranchBatch."""

    def __init__(self, engine: ReplayingEngine, request: GenerateRequest):
        self._engine, self._request = engine, request
        self.stats = Stats()
        self._groups_P: list[Group] = []
        self._histories_P_G: HistoriesPG = []

    def sample(self) -> list[Group]:
        self._groups_P, self._histories_P_G = self._engine.sample(self._request)
        self.stats = self._engine.stats
        return self._groups_P

    def branch(self, pivots: list[Pivot], num_branches: int) -> list[Group]:
        """Return a group of num_branches samples for each pivot."""
        parents = list(map(self._parent, pivots))
        branches = self._engine.branch(parents, num_branches, self._request)
        self.stats += self._engine.stats
        return [
            Group(prompt=parent.prompt, samples_G=samples_G, prefix_tokens=parent.prefix_tokens)
            for parent, samples_G in zip(parents, branches, strict=True)
        ]

    def _parent(self, pivot: Pivot) -> Parent:
        group = self._groups_P[pivot.group_index]
        return Parent(
            row=self._request.prompts_P[pivot.group_index],
            prompt=group.prompt,
            sample=group.samples_G[pivot.sample_index],
            history=self._histories_P_G[pivot.group_index][pivot.sample_index],
            prefix_tokens=pivot.prefix_tokens,
        )


class SingleTurns(ReplayingEngine):
    """Samples of an engine that keeps no keys and values of theirs; they have no history."""

    def __init__(self, engine: LocalEngine):
        self._engine, self.stats = engine, Stats()

    def publish(self, version: int) -> None:
        self._engine.publish(version)

    def take_metrics(self) -> dict[str, float]:
        return self._engine.take_metrics()

    def sample(self, request: GenerateRequest) -> tuple[list[Group], HistoriesPG]:
        groups = self._engine.generate(request)
        self.stats = self._engine.stats
        return groups, [[None] * request.num_samples for _ in groups]

    def branch(
        self, parents: list[Parent], num_branches: int, request: GenerateRequest
    ) -> list[list[Sample]]:
        groups = self._engine.generate(branch_request(parents, num_branches, request))
        self.stats, stopping = self._engine.stats, self._engine.stopping(request.sampling.stop)
        branches_P_G = joined_groups(parents, groups)
        return [
            [dataclasses.replace(b, text=stopping.text(b.tokens_T)) for b in each] for each in branches_P_G
        ]


def branch_request(parents: list[Parent], num_branches: int, request: GenerateRequest) -> GenerateRequest:
    """Return the request for what follows each parent's pivot: its tokens before the pivot are prompt."""
    lengths = [request.sampling.max_tokens - parent.prefix_tokens for parent in parents]
    return dataclasses.replace(
        request,
        prompts_P=[_begun_prompt(parent, request.num_samples) for parent in parents],
        num_samples=num_branches,
        seed=mix(request.seed, _BRANCH),
        max_tokens_P_G=[[max_tokens] * num_branches for max_tokens in lengths],
    )


def _begun_prompt(parent: Parent, num_samples: int) -> Prompt:
    """Return the parent's prompt with its tokens before the pivot, and an index of the parent's own."""
    index = parent.prompt.index * num_samples + parent.sample.sample_index
    tokens_T = parent.prompt.tokens_T + parent.sample.tokens_T[: parent.prefix_tokens]
    return dataclasses.replace(parent.prompt, index=index, tokens_T=tokens_T)


def spans_before(parent: Parent) -> list[range]:
    """Return the spans of an environment before the pivot."""
    return [span for span in parent.sample.environment_spans if span.stop <= parent.prefix_tokens]


def joined_groups(parents: list[Parent], groups: list[Group]) -> list[list[Sample]]:
    """Return each parent's branches, its tokens before the pivot included."""
    pairs = zip(parents, groups, strict=True)
    return [[_joined(parent, sample) for sample in group.samples_G] for parent, group in pairs]


def _joined(parent: Parent, sample: Sample) -> Sample:
    """Return the sample after the parent's tokens before the pivot."""
    before, n, spans = parent.sample, parent.prefix_tokens, spans_before(parent)
    num_sampled = n - sum(map(len, spans))
    return dataclasses.replace(
        sample,
        tokens_T=before.tokens_T[:n] + sample.tokens_T,
        logprobs_T=before.logprobs_T[:num_sampled] + sample.logprobs_T,
        environment_spans=(*spans, *(range(n + s.start, n + s.stop) for s in sample.environment_spans)),
        sample_index=before.sample_index,
    )
