"""Minibatches: split a step's groups by update, weight their tokens, pack them.

    weight of a token    over all samples of the update, independent of packing
    with_gradient        groups that have a gradient; all of them in distillation
    without_gradient     groups without any advantage and without KL penalty: their gradient is exactly zero;
                         of these learn.read_share, evenly spaced, which stand for all of them in the metrics
    loss                 of the samples, plus algo.deep.weight times the loss of the branches

A branch's tokens before its pivot count as prompt here. A group without a gradient still counts in the
weights of the others (tests/learn/test_equivalence.py). With several ranks each gets whole groups of every
minibatch, balanced by the rows of groups with a gradient; weights are over all ranks.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from qerl.algo.loss import LOSSES
from qerl.config import DistilConfig, RunConfig
from qerl.learner.distributed import ALONE, Ranks
from qerl.learner.packing import PackedBatch, pack
from qerl.types import Group, Sample

Weighted = tuple[Group, list[float]]
"""A group with the weights of its samples' tokens."""


class MinibatchPart:
    """Groups with the weights of their samples' tokens, packed on request."""

    def __init__(self, weighted_P: list[Weighted], device: torch.device):
        self._weighted_P, self._device = weighted_P, device
        self._max_tokens: int | None = None
        self._batches: Sequence[PackedBatch] = ()

    @property
    def groups(self) -> list[Group]:
        """The packed samples (those with a weight), in the order of their tokens in the batches."""
        return [
            dataclasses.replace(
                group, samples_G=[s for s, w in zip(group.samples_G, weights_G, strict=True) if w]
            )
            for group, weights_G in self._weighted_P
        ]

    def batches(self, max_tokens: int) -> Sequence[PackedBatch]:
        """Return the packed batches; the order of the sampled tokens does not depend on max_tokens."""
        if max_tokens != self._max_tokens:
            self._batches = pack(self._weighted_P, max_tokens=max_tokens, device=self._device)
            self._max_tokens = max_tokens
        return self._batches


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """Samples of one update, on this rank."""

    with_gradient: MinibatchPart
    without_gradient: MinibatchPart
    read_weight: float
    """Factor of the tokens of without_gradient in the step's metrics."""
    has_gradient: bool
    """True if any rank has a token to learn from."""
    num_samples: int
    """Number of samples on all ranks, of both kinds."""


def split(
    groups_P: list[Group], config: RunConfig, *, device: torch.device, ranks: Ranks = ALONE
) -> list[Minibatch]:
    """Return one minibatch per update of a pass: consecutive groups, split as evenly as possible, samples and
    branches alike. Where there are more updates than prompts, groups are split too."""
    samples = [group for group in groups_P if not group.is_branch]
    branches = [group for group in groups_P if group.is_branch]
    num_parts = config.learn.updates_per_step
    splits_groups = num_parts > config.num_prompts and all(group.num_sampled is None for group in samples)
    of_updates = _split_groups(samples, config) if splits_groups else _parts(samples, num_parts)
    parts = zip(of_updates, _parts(branches, num_parts), strict=True)
    return [_share(of_samples, of_branches, config, device, ranks) for of_samples, of_branches in parts]


def _parts(groups_P: list[Group], num_parts: int) -> list[list[Group]]:
    bounds = [i * len(groups_P) // num_parts for i in range(num_parts + 1)]
    return [groups_P[start:stop] for start, stop in pairwise(bounds)]


def _split_groups(groups_P: list[Group], config: RunConfig) -> list[list[Group]]:
    """Return an equal share of consecutive samples for each update, in groups of the same prompt. A sample
    that was dropped leaves its place empty."""
    num_parts, size = config.learn.updates_per_step, config.num_generations
    update_P_G = [
        [(p * size + g) * num_parts // (len(groups_P) * size) for g in range(size)]
        for p in range(len(groups_P))
    ]
    return [
        [
            dataclasses.replace(
                group,
                samples_G=[s for s in group.samples_G if update_G[s.sample_index] == part],
                num_sampled=update_G.count(part),
            )
            for group, update_G in zip(groups_P, update_P_G, strict=True)
            if part in update_G
        ]
        for part in range(num_parts)
    ]


def _share(
    samples_P: list[Group], branches_P: list[Group], config: RunConfig, device: torch.device, ranks: Ranks
) -> Minibatch:
    deep = config.algo.deep
    known_P = [_with_known(group, config.distil) for group in samples_P]
    grown_P = [after_prefix(_with_known(group, config.distil)) for group in branches_P]
    weights_P_G = _weights(known_P, config, config.num_generations)
    weights_P_G += [[deep.weight * w for w in ws] for ws in _weights(grown_P, config, deep.num_branches)]
    known_P += grown_P
    with_gradient, without_gradient = [], []
    has_other_loss = config.algo.beta > 0 or config.distil.is_on
    for group, weights_G in zip(known_P, weights_P_G, strict=True):
        has_gradient = has_other_loss or any(sample.advantage != 0 for sample in group.samples_G)
        (with_gradient if has_gradient else without_gradient).append((group, weights_G))
    read = _evenly_spaced(without_gradient, config.learn.read_share)
    return Minibatch(
        with_gradient=MinibatchPart(_balanced(with_gradient, ranks), device),
        without_gradient=MinibatchPart(_balanced(read, ranks), device),
        read_weight=_num_tokens(without_gradient) / max(_num_tokens(read), 1),
        has_gradient=any(weight for _, weights_G in with_gradient for weight in weights_G),
        num_samples=sum(len(group.samples_G) for group in known_P),
    )


def _evenly_spaced(weighted_P: list[Weighted], share: float) -> list[Weighted]:
    """Return this share of the groups that have tokens, rounded up."""
    known_P = [pair for pair in weighted_P if _num_tokens([pair])]
    count = math.ceil(share * len(known_P))
    return [known_P[i * len(known_P) // count] for i in range(count)]


def _num_tokens(weighted_P: list[Weighted]) -> int:
    """Return the sampled tokens that are packed."""
    pairs = (pair for group, weights_G in weighted_P for pair in zip(group.samples_G, weights_G, strict=True))
    return sum(len(sample.logprobs_T) for sample, weight in pairs if weight)


def _balanced(weighted_P: list[Weighted], ranks: Ranks) -> list[Weighted]:
    """Return this rank's groups: the largest first, each to the rank with the fewest rows so far."""
    rows_P = [
        len(group.prompt.tokens_T) + sum(len(s.tokens_T) for s in group.samples_G) for group, _ in weighted_P
    ]
    loads, chosen = [0] * ranks.count, set()
    for p in sorted(range(len(rows_P)), key=rows_P.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += rows_P[p]
        chosen |= {p} if rank == ranks.index else set()
    return [pair for p, pair in enumerate(weighted_P) if p in chosen]


def _with_known(group: Group, distil: DistilConfig) -> Group:
    """Keep the samples that have a reward, or in distillation the teacher's logprobs."""
    known_G = [s.teacher if distil.is_on else s.reward for s in group.samples_G]
    pairs = zip(group.samples_G, known_G, strict=True)
    return dataclasses.replace(group, samples_G=[s for s, known in pairs if known is not None])


def after_prefix(group: Group) -> Group:
    """Move the tokens before the pivot into the prompt."""
    if not group.samples_G or group.is_after_pivot:
        return group
    n, prompt = group.prefix_tokens, group.prompt
    prompt = dataclasses.replace(prompt, tokens_T=prompt.tokens_T + group.samples_G[0].tokens_T[:n])
    return Group(prompt=prompt, samples_G=[_without_prefix(s, n) for s in group.samples_G])


def _without_prefix(sample: Sample, n: int) -> Sample:
    """Return the sample after its first n tokens, of which an environment may have written whole spans."""
    spans = sample.environment_spans
    num_sampled = n - sum(len(span) for span in spans if span.stop <= n)
    return dataclasses.replace(
        sample,
        tokens_T=sample.tokens_T[n:],
        logprobs_T=sample.logprobs_T[num_sampled:],
        environment_spans=tuple(range(s.start - n, s.stop - n) for s in spans if s.stop > n),
    )


def _weights(groups_P: list[Group], config: RunConfig, num_samples: int) -> list[list[float]]:
    """Return the tokens' weights. A dropped sample still counts in num_samples: the mean is over all sampled
    ones."""
    sizes_P = [num_samples if group.num_sampled is None else group.num_sampled for group in groups_P]
    return LOSSES[config.algo.loss_type].weights(
        [[len(sample.logprobs_T) for sample in group.samples_G] for group in groups_P],
        num_samples=sum(sizes_P),
        max_tokens=config.sample.max_tokens,
    )
