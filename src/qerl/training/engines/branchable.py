"""The interface of engines that can branch their samples: single turns, environments, agents, ranks, Ray."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from qerl.engine.stats import Stats
from qerl.types import GenerateRequest, Group, Pivot


class Branchable(Protocol):
    """Samples of some prompts, and then branches of them."""

    def sample(self) -> list[Group]: ...

    def branch(self, pivots: list[Pivot], num_branches: int) -> list[Group]: ...


@runtime_checkable
class BranchingEngine(Protocol):
    stats: Stats
    """Sum over all batches, after branch_batches."""

    def branch_batches(self, request: GenerateRequest) -> Iterator[Branchable]:
        """Yield batches that together have the samples of all prompts."""
        ...
