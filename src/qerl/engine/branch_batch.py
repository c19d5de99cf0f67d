"""Sample a batch of prompts, then branch the samples on the KV pages that they left.

    sample   all samples of every prompt; finished ones keep their pages
    branch   more samples from pivots in them; the tokens before a pivot are not computed again

A branch shares the full pages before its pivot and copies the page that the pivot lies in, as a sample does
with its prompt's (cache_space.py). Prompts whose samples need more pages than there are come in several
batches, one after the other; the samples do not depend on the split (tests/engine/test_branch_batch.py).
"""

from collections.abc import Callable

import torch

from qerl.engine.generation import Generation
from qerl.engine.schedule.live_sample import LiveGroup, LiveSample
from qerl.types import Group, Pivot


class BranchBatch:
    """Call `sample` once, then `branch` once."""

    def __init__(
        self, groups: list[LiveGroup], generation: Generation, to_group: Callable[[LiveGroup], Group]
    ):
        self._groups, self._generation, self._to_group = groups, generation, to_group

    @torch.no_grad()
    def sample(self) -> list[Group]:
        self._generation.run()
        return [self._to_group(group) for group in self._groups]

    @torch.no_grad()
    def branch(self, pivots: list[Pivot], num_branches: int) -> list[Group]:
        """Return a group of num_branches samples for each pivot in the groups that `sample` returned."""
        branches = [self._branch_group(pivot, num_branches) for pivot in pivots]
        self._generation.branch(branches)
        self._generation.run()
        return [self._to_group(group) for group in branches]

    def _branch_group(self, pivot: Pivot, num_branches: int) -> LiveGroup:
        group = self._groups[pivot.group_index]
        parent, num_shared = group.samples_G[pivot.sample_index], pivot.prefix_tokens - 1
        assert 0 <= num_shared < len(parent.tokens_T) - 1, "a pivot must lie inside its sample"
        branch = LiveGroup(
            index=group.index,
            prompt=group.prompt,
            coordinates=(*group.coordinates, parent.sample_index),
            prompt_tokens=group.prompt_tokens + num_shared,
            max_tokens=group.max_tokens - num_shared,
            parent=parent,
            noise_row=parent.noise_row,
        )
        last = slice(num_shared, pivot.prefix_tokens)
        branch.samples_G = [
            LiveSample(
                group=branch,
                sample_index=branch_index,
                tokens_T=parent.tokens_T[last],
                logprobs_T=parent.logprobs_T[last],
                noise_row=parent.noise_row,
            )
            for branch_index in range(num_branches)
        ]
        return branch
