"""Metrics of a step from passes over packed batches.

    d_t = learner_t - sampler_t             for every sampled token, before the step's first update
    mismatch_abs = mean |d|                 mismatch_max = max |d|
    mismatch_kl  = mean(exp(d) - 1 - d)     k3 of KL(sampler || learner)
    mismatch_early, mismatch_late           mean |d| over the first and last quarter of each sample
    mismatch_sample = mean |sum of d|       over samples: |log| of a sequence's ratio
    entropy = mean of the learner's entropy at every token     sampler_entropy = -mean(sampler_t), an estimate

The off-policy correction, over the tokens of all updates: capped_fraction, masked_fraction,
effective_fraction, and rejected_fraction of the samples (`algo/importance.py`).

Of a mixture of experts: expert_load_max and _min over experts and layers, 1 being an equal share;
expert_entropy, 1 being equal loads; route_changes, the share of routes, one per row and layer, that the
learner would choose otherwise than the sampler did; route_change_rows, the share of rows with one.

In exact mode learner_t comes from the sampler's forward pass; own_mismatch_abs and so on then measure the
learner's own kernels, which compute the gradient. A metric over no tokens is omitted, never NaN.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qerl.algo.importance import Correction, effective_fraction
from qerl.algo.kl import k3
from qerl.learner.packing import PackedBatch
from qerl.learner.router_replay import RoutingReading


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchMetrics:
    """The learner's values for a batch's sampled tokens at one version; no gradient."""

    batch: PackedBatch
    logprob_C: Tensor
    entropy_C: Tensor
    reference_C: Tensor | None
    """Logprobs of the model without adapter; None without a KL penalty."""
    own_C: Tensor | None = None
    """Logprobs of the learner's own kernels if logprob_C comes from the sampler; else None."""
    routing: RoutingReading | None = None
    """Routes of a mixture of experts; None for another model."""
    weight: float = 1.0
    """Factor of each token in the step's metrics: it may stand for others that are not read."""


def divided(values_C: Tensor | None, batches: Sequence[PackedBatch]) -> Sequence[Tensor | None]:
    """Split values of all tokens by batch."""
    if values_C is None:
        return [None] * len(batches)
    return values_C.split([len(batch.targets_C) for batch in batches])


def regrouped(readings: list[BatchMetrics], batches: Sequence[PackedBatch]) -> list[BatchMetrics]:
    """Return the same values for the same sampled tokens in another packing."""
    if [len(r.logprob_C) for r in readings] == [len(batch.targets_C) for batch in batches]:
        return readings
    parts: dict[str, Sequence[Any]] = {}
    for name in ("logprob_C", "entropy_C", "reference_C", "own_C"):
        values_C = [part_C for r in readings if (part_C := getattr(r, name)) is not None]
        parts[name] = divided(torch.cat(values_C) if values_C else None, batches)
    each = (dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True))
    return [BatchMetrics(batch=batch, **values) for batch, values in zip(batches, each, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MinibatchMetrics:
    """Contribution of a batch to one update."""

    before: BatchMetrics
    loss: Tensor
    ratio_C: Tensor
    held_C: Tensor
    """Share of each token's gradient that the policy loss held back."""
    correction: Correction
    kl_C: Tensor | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One planned optimizer update."""

    results: list[MinibatchMetrics]
    """Metrics of this rank's batches."""
    norm: Tensor | None
    """Norm before clipping; None if the update was skipped, as no rank had anything to learn."""
    grad_norm: float | None
    """The same, once the host has read it. None if nothing was applied: skipped, or not finite."""
    learning_rate: float

    @property
    def is_skipped(self) -> bool:
        return self.norm is None


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """A mean that combines over ranks: Tally(total=6.0, count=3, max=4.0).mean is 2.0."""

    total: float
    count: float
    max: float

    @staticmethod
    def of(parts_C: list[Tensor]) -> "Tally":
        return to_host({"": reduce_on_device(parts_C)})[""]

    @property
    def mean(self) -> float:
        return self.total / self.count

    def __add__(self, other: "Tally") -> "Tally":
        is_number = not (math.isnan(self.max) or math.isnan(other.max))
        highest = max(self.max, other.max) if is_number else math.nan
        return Tally(self.total + other.total, self.count + other.count, highest)

    def weighted(self, weight: float) -> "Tally":
        """Return the tally of as many times the values."""
        return self if weight == 1 else Tally(weight * self.total, weight * self.count, self.max)


class DeviceTally(NamedTuple):
    """A Tally that is still on the device, in float64."""

    total: Tensor
    max: Tensor
    number: Tensor


N = TypeVar("N")
Tallies = dict[str, Tally]
DeviceTallies = dict[str, DeviceTally]


def reduce_on_device(parts_C: list[Tensor], masks: list[Tensor] | None = None) -> DeviceTally:
    """Reduce the values, or those where the masks are true; the host does not wait."""
    values_C = torch.cat(parts_C).double()
    if masks is None:
        return DeviceTally(values_C.sum(), values_C.max(), values_C.new_full((), len(values_C)))
    mask_C = torch.cat(masks)
    total = values_C.where(mask_C, 0.0).sum()
    return DeviceTally(total, values_C.where(mask_C, -math.inf).max(), mask_C.sum().double())


def to_host(measures: dict[N, DeviceTally]) -> dict[N, Tally]:
    """Wait for the device, once, and return the tallies of those that have values."""
    values = [value for each in measures.values() for value in each]
    numbers = torch.stack(values).tolist() if values else []
    thirds = zip(measures, numbers[0::3], numbers[1::3], numbers[2::3], strict=True)
    return {name: Tally(total, int(count), highest) for name, total, highest, count in thirds if count}


def added(tallies: list[Tallies]) -> Tallies:
    """Combine the tallies of all ranks; one without tokens has none."""
    names = dict.fromkeys(name for each in tallies for name in each)
    return {name: reduce(Tally.__add__, [t[name] for t in tallies if name in t]) for name in names}


def sampling_measures(first: list[BatchMetrics]) -> DeviceTallies:
    """Compare learner and sampler, from the step's first pass."""
    if not first:
        return {}
    sampler_C = torch.cat([reading.batch.sampler_logprobs_C for reading in first])
    learner_C = torch.cat([reading.logprob_C for reading in first])
    is_sampled = [reading.batch.is_sampled_C for reading in first]
    owns = [reading.own_C for reading in first if reading.own_C is not None]
    teachers = [reading.batch.teacher.logprob_C for reading in first if reading.batch.teacher is not None]
    measures = {
        "entropy": reduce_on_device([reading.entropy_C for reading in first]),
        **_routing([reading.routing for reading in first if reading.routing is not None]),
        "sampler": reduce_on_device([sampler_C], is_sampled),
        **_mismatch("mismatch", sampler_C, learner_C, is_sampled),
    }
    if owns:
        measures |= _mismatch("own_mismatch", sampler_C, torch.cat(owns), is_sampled)
    if teachers:
        measures["teacher_kl"] = reduce_on_device([learner_C - torch.cat(teachers)], is_sampled)
    return measures | _by_length(first)


def _routing(readings: list[RoutingReading]) -> DeviceTallies:
    """Tally the load of experts, 1 being an equal share, and the routes that differ from the sampler's."""
    if not readings:
        return {}
    counts_LE = torch.stack([reading.counts_LE for reading in readings]).sum(0).double()
    share_LE = counts_LE / counts_LE.sum(1, keepdim=True)
    num_experts = share_LE.shape[1]
    load = (share_LE * num_experts).flatten()
    entropy_L = torch.special.entr(share_LE).sum(1) / math.log(num_experts) if num_experts > 1 else load[:1]
    measures = {
        "expert_load": reduce_on_device([load]),
        "expert_idle": reduce_on_device([-load]),
        "expert_entropy": reduce_on_device([entropy_L]),
    }
    differs = [reading.differs_TL for reading in readings if reading.differs_TL is not None]
    if differs:
        measures["route_changes"] = reduce_on_device([each.flatten() for each in differs])
        measures["route_change_rows"] = reduce_on_device([each.any(1) for each in differs])
    return measures


def _mismatch(name: str, sampler_C: Tensor, learner_C: Tensor, is_sampled: list[Tensor]) -> DeviceTallies:
    distance_C, kl_C = (learner_C - sampler_C).abs(), k3(sampler_C, learner_C)
    return {
        name: reduce_on_device([distance_C], is_sampled),
        f"{name}_kl": reduce_on_device([kl_C], is_sampled),
    }


def update_measures(update: Update) -> DeviceTallies:
    """Measure the update's tokens, and its norm."""
    corrections = [result.correction for result in update.results]
    norm = {} if update.norm is None else {"norm": reduce_on_device([update.norm[None]])}
    if not corrections:
        return norm
    weight_C = torch.cat([correction.weight_T for correction in corrections]).double()
    kl = [result.kl_C for result in update.results if result.kl_C is not None]
    return norm | {
        "loss": reduce_on_device([result.loss[None] for result in update.results]),
        "ratio": reduce_on_device([result.ratio_C for result in update.results]),
        "held": reduce_on_device([result.held_C for result in update.results]),
        "weight": reduce_on_device([weight_C]),
        "weight_squared": reduce_on_device([weight_C.square()]),
        "capped": reduce_on_device([correction.was_capped_T for correction in corrections]),
        "masked": reduce_on_device([correction.was_masked_T for correction in corrections]),
        "rejected": reduce_on_device([correction.was_rejected_S for correction in corrections]),
        **({"kl": reduce_on_device(kl)} if kl else {}),
    }


def read_step(first: list[BatchMetrics], updates: list[Update]) -> tuple[Tallies, list[Update]]:
    """Wait for the device, once. Return the tallies of the first pass and of the applied updates, and the
    updates with their norms."""
    weights = list(dict.fromkeys(reading.weight for reading in first))
    passes = [sampling_measures([r for r in first if r.weight == weight]) for weight in weights]
    passes += map(update_measures, updates)
    tallies = to_host({(i, name): x for i, measures in enumerate(passes) for name, x in measures.items()})
    by_pass = [{name: tally for (at, name), tally in tallies.items() if at == i} for i in range(len(passes))]
    readings, by_update = by_pass[: len(weights)], by_pass[len(weights) :]
    first_pass = added(
        [
            {name: tally.weighted(weight) for name, tally in each.items()}
            for weight, each in zip(weights, readings, strict=True)
        ]
    )
    norms = [each["norm"].total if "norm" in each else math.nan for each in by_update]
    done = [
        dataclasses.replace(u, grad_norm=n if math.isfinite(n) else None)
        for u, n in zip(updates, norms, strict=True)
    ]
    applied = [each for each, u in zip(by_update, done, strict=True) if u.grad_norm is not None]
    rows = {"rows": Tally(sum(len(reading.batch.tokens_T) for reading in first), 1, 0)} if first else {}
    return rows | first_pass | added(applied), done


def _by_length(readings: list[BatchMetrics]) -> DeviceTallies:
    """Measure by position: mismatch accumulates over long samples (Jet-RL, arXiv 2601.14243)."""
    early, late, samples = [], [], []
    distances, sums = [], []
    for reading in readings:
        spans = reading.batch.spans
        is_sampled_C = reading.batch.is_sampled_C
        d_C = reading.logprob_C - reading.batch.sampler_logprobs_C
        quarter_C = 4 * (spans.places_T % max(spans.longest, 1)) // spans.per_token(spans.lengths_S)
        distances.append(d_C.abs())
        early.append((quarter_C == 0) & is_sampled_C)
        late.append((quarter_C == 3) & is_sampled_C)
        sums.append(spans.total(d_C).abs())
        samples.append(spans.total(is_sampled_C.float()) > 0)
    return {
        "mismatch_early": reduce_on_device(distances, early),
        "mismatch_late": reduce_on_device(distances, late),
        "mismatch_sample": reduce_on_device(sums, samples),
    }


def sampling_metrics(tallies: Tallies) -> dict[str, float]:
    if "rows" not in tallies:
        return {"learn_tokens": 0}
    metrics = {"learn_tokens": tallies["rows"].total, "entropy": tallies["entropy"].mean}
    if "sampler" in tallies:
        metrics["sampler_entropy"] = -tallies["sampler"].mean
    if "teacher_kl" in tallies:
        metrics["teacher_kl"] = tallies["teacher_kl"].mean
    for name in ("mismatch", "own_mismatch"):
        if name in tallies:
            metrics |= {f"{name}_abs": tallies[name].mean, f"{name}_max": tallies[name].max}
            metrics |= {f"{name}_kl": tallies[f"{name}_kl"].mean}
    if "expert_load" in tallies:
        metrics |= {"expert_load_max": tallies["expert_load"].max}
        metrics |= {"expert_load_min": -tallies["expert_idle"].max}
    for name in ("expert_entropy", "route_changes", "route_change_rows"):
        if name in tallies:
            metrics[name] = tallies[name].mean
    for name in ("mismatch_early", "mismatch_late", "mismatch_sample"):
        if name in tallies:
            metrics[name] = tallies[name].mean
    return metrics


def update_metrics(updates: list[Update], tallies: Tallies) -> dict[str, float]:
    """Return the metrics of the step's updates: means over the applied ones, or over their tokens."""
    norms = [u.grad_norm for u in updates if u.grad_norm is not None]
    num_skipped = sum(u.is_skipped for u in updates)
    metrics: dict[str, float] = {
        "learning_rate": updates[-1].learning_rate,
        "skipped_updates": num_skipped,
        "nonfinite_updates": len(updates) - num_skipped - len(norms),
    }
    if not norms:
        return metrics
    weight, squared = tallies["weight"], tallies["weight_squared"].total
    metrics |= {
        "loss": tallies["loss"].total / len(norms),
        "grad_norm": sum(norms) / len(norms),
        "ratio_mean": tallies["ratio"].mean,
        "clip_fraction": tallies["held"].mean,
        "importance_weight_mean": weight.mean,
        "capped_fraction": tallies["capped"].mean,
        "masked_fraction": tallies["masked"].mean,
        "rejected_fraction": tallies["rejected"].mean,
    }
    if squared > 0 and math.isfinite(squared):
        metrics["effective_fraction"] = effective_fraction(weight.total, squared, weight.count)
    return metrics | ({"kl_reference": tallies["kl"].mean} if "kl" in tallies else {})
