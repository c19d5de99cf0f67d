"""Prompts whose samples are drawn, looked at, and branched on the pages that they left.

    sample   every prompt's samples; finished ones keep their pages
    branch   more samples from pivots in them; the first tokens are the pivot's, and are not computed again

A branch shares the full pages before its pivot and copies the one that the pivot lies in, as a sample does
with its prompt's (scheduler.py). Prompts whose samples need more pages than there are come in lots, one after
the other; what is drawn does not depend on that (tests/engine/test_branch_batch.py).
"""

from collections.abc import Callable, Iterator

import torch

from qerl.engine.generation import Generation
from qerl.engine.scheduler import LiveGroup, LiveSample, kept_pages
from qerl.types import Group, Pivot


class BranchBatch:
    """Sampled once, then branched once."""

    def __init__(
        self, groups: list[LiveGroup], generation: Generation, finished: Callable[[LiveGroup], Group]
    ):
        self._groups, self._generation, self._finished = groups, generation, finished

    @torch.no_grad()
    def sample(self) -> list[Group]:
        self._generation.run()
        return [self._finished(group) for group in self._groups]

    @torch.no_grad()
    def branch(self, pivots: list[Pivot], num_branches: int) -> list[Group]:
        """A group of num_branches for each pivot in what `sample` returned, in their order."""
        branched = [self._branched(pivot, num_branches) for pivot in pivots]
        self._generation.branch(branched)
        self._generation.run()
        return [self._finished(group) for group in branched]

    def _branched(self, pivot: Pivot, num_branches: int) -> LiveGroup:
        group = self._groups[pivot.group_index]
        parent, num_shared = group.samples_G[pivot.sample_index], pivot.prefix_tokens - 1
        assert 0 <= num_shared < len(parent.tokens_T) - 1, "nothing is before the pivot, or nothing after it"
        branched = LiveGroup(
            index=group.index,
            prompt_tokens=group.prompt_tokens + num_shared,
            max_tokens=group.max_tokens - num_shared,
            parent=parent,
            noise_row=parent.noise_row,
        )
        last = slice(num_shared, pivot.prefix_tokens)
        branched.samples_G = [
            LiveSample(
                group=branched,
                sample_index=branch_index,
                tokens_T=parent.tokens_T[last],
                logprobs_T=parent.logprobs_T[last],
                noise_row=parent.noise_row,
            )
            for branch_index in range(num_branches)
        ]
        return branched


def split_batches(groups: list[LiveGroup], num_pages: int, page_tokens: int) -> Iterator[list[LiveGroup]]:
    """The groups in lots, each as large as its pages may be."""
    lot, held = [], 0
    for group in groups:
        needed = kept_pages(group, page_tokens)
        if lot and held + needed > num_pages:
            yield lot
            lot, held = [], 0
        lot.append(group)
        held += needed
    if lot:
        yield lot
