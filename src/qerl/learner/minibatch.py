"""Divides a step's groups among its updates, weighs their tokens, and packs them as small as need be.

    weight of a token    over all samples of the update, before it is known how they are packed
    teaching             groups that a gradient comes from
    silent               groups without any advantage, where no KL is taken: their gradient is exactly zero
    loss                 of the samples, plus algo.deep.weight times that of the branches, each over its own

A branch's tokens before its pivot count as prompt here. A silent group still counts in the weights of the
others (tests/learn/test_equivalence.py). With several ranks each has whole groups of every
share, about as many rows of teaching ones as any other; weights are over all.
"""

import dataclasses
from itertools import pairwise

import torch

from qerl.algo.loss import LOSSES
from qerl.config import RunConfig
from qerl.learner.distributed import ALONE, Ranks
from qerl.learner.packing import PackedBatch, pack
from qerl.types import Group


class MinibatchPart:
    """Groups with the weights of their samples' tokens, packed for as long as the packing is asked for."""

    def __init__(self, weighted_P: list[tuple[Group, list[float]]], device: torch.device):
        self._weighted_P, self._device = weighted_P, device
        self._max_tokens: int | None = None
        self._batches: list[PackedBatch] = []

    @property
    def groups(self) -> list[Group]:
        """What is packed: the samples of some weight, in the order of their tokens in the batches."""
        return [
            dataclasses.replace(
                group, samples_G=[s for s, w in zip(group.samples_G, weights_G, strict=True) if w]
            )
            for group, weights_G in self._weighted_P
        ]

    def batches(self, max_tokens: int) -> list[PackedBatch]:
        """The sampled tokens stand in the same order however they are packed."""
        if max_tokens != self._max_tokens:
            self._batches = pack(self._weighted_P, max_tokens=max_tokens, device=self._device)
            self._max_tokens = max_tokens
        return self._batches


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """What one update learns from, on this rank."""

    teaching: MinibatchPart
    silent: MinibatchPart
    is_taught: bool
    """Whether any rank has a token to learn from."""
    num_samples: int
    """How many samples all ranks have, of both kinds."""


def split(
    groups_P: list[Group], config: RunConfig, *, device: torch.device, ranks: Ranks = ALONE
) -> list[Minibatch]:
    """One share for each update of a pass: consecutive groups, as equally many each as can be, of samples and
    of branches."""
    samples = [group for group in groups_P if not group.prefix_tokens]
    branches = [group for group in groups_P if group.prefix_tokens]
    num_parts = config.learn.updates_per_step
    parts = zip(_parts(samples, num_parts), _parts(branches, num_parts), strict=True)
    return [_share(of_samples, of_branches, config, device, ranks) for of_samples, of_branches in parts]


def _parts(groups_P: list[Group], num_parts: int) -> list[list[Group]]:
    bounds = [i * len(groups_P) // num_parts for i in range(num_parts + 1)]
    return [groups_P[start:stop] for start, stop in pairwise(bounds)]


def _share(
    samples_P: list[Group], branches_P: list[Group], config: RunConfig, device: torch.device, ranks: Ranks
) -> Minibatch:
    deep = config.algo.deep
    known_P = [_with_rewards(group) for group in samples_P]
    grown_P = [after_prefix(_with_rewards(group)) for group in branches_P]
    weights_P_G = _weights(known_P, config, config.num_generations)
    weights_P_G += [[deep.weight * w for w in ws] for ws in _weights(grown_P, config, deep.num_branches)]
    known_P += grown_P
    teaching, silent = [], []
    for pair in zip(known_P, weights_P_G, strict=True):
        (teaching if _teaches(pair[0], config) else silent).append(pair)
    return Minibatch(
        teaching=MinibatchPart(_dealt(teaching, ranks), device),
        silent=MinibatchPart(_dealt(silent, ranks), device),
        is_taught=any(weight for _, weights_G in teaching for weight in weights_G),
        num_samples=sum(len(group.samples_G) for group in known_P),
    )


def _dealt(weighted_P: list[tuple[Group, list[float]]], ranks: Ranks) -> list[tuple[Group, list[float]]]:
    """This rank's: the largest group first, each to the rank with the fewest rows so far; in their order."""
    rows_P = [
        len(group.prompt.tokens_T) + sum(len(s.tokens_T) for s in group.samples_G) for group, _ in weighted_P
    ]
    loads, own = [0] * ranks.count, set()
    for p in sorted(range(len(rows_P)), key=rows_P.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += rows_P[p]
        own |= {p} if rank == ranks.index else set()
    return [pair for p, pair in enumerate(weighted_P) if p in own]


def _with_rewards(group: Group) -> Group:
    return dataclasses.replace(group, samples_G=[s for s in group.samples_G if s.reward is not None])


def after_prefix(group: Group) -> Group:
    """As if what came before the pivot had been in the prompt."""
    if not group.samples_G:
        return group
    n, prompt = group.prefix_tokens, group.prompt
    prompt = dataclasses.replace(prompt, tokens_T=prompt.tokens_T + group.samples_G[0].tokens_T[:n])
    samples_G = [
        dataclasses.replace(s, tokens_T=s.tokens_T[n:], logprobs_T=s.logprobs_T[n:]) for s in group.samples_G
    ]
    return Group(prompt=prompt, samples_G=samples_G)


def _weights(groups_P: list[Group], config: RunConfig, num_samples: int) -> list[list[float]]:
    """A sample that was left out still counts in num_samples: the mean is over what was drawn."""
    return LOSSES[config.algo.loss_type].weights(
        [[len(sample.logprobs_T) for sample in group.samples_G] for group in groups_P],
        num_samples=len(groups_P) * num_samples,
        max_tokens=config.sample.max_tokens,
    )


def _teaches(group: Group, config: RunConfig) -> bool:
    return config.algo.beta > 0 or any(sample.advantage != 0 for sample in group.samples_G)
