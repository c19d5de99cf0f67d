"""What passes over packed batches say of the policies, and the step's metrics from it.

    d_t = learner_t - sampler_t             of every sampled token, before the step's first update
    mismatch_abs = mean |d|                 mismatch_max = max |d|
    mismatch_kl  = mean(exp(d) - 1 - d)     k3 of KL(sampler || learner)
    mismatch_early, mismatch_late           mean |d| over the first and the last quarter of each sample
    mismatch_sample = mean |sum of d|       over samples: how far the ratio of a whole one is from 1, in log
    entropy = mean of the learner's at every token            sampler_entropy = -mean(sampler_t), an estimate

What the correction for the sampler did, over the tokens of all updates: capped_fraction, masked_fraction,
effective_fraction, and rejected_fraction of the samples (`algo/importance.py`).

In exact mode learner_t is by the sampler's own forward; own_mismatch_abs and so on then say the same of the
learner's kernels, which the gradient is from. A metric of no tokens is left out, never NaN.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qerl.algo.importance import Correction, effective_fraction
from qerl.algo.kl import k3
from qerl.learner.pack import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the learner says of a batch's sampled tokens at one version; no gradient."""

    batch: PackedBatch
    logprob_C: Tensor
    entropy_C: Tensor
    reference_C: Tensor | None
    """Logprobs of the model without its adapter; None where no KL is taken."""
    own_C: Tensor | None = None
    """By the learner's own kernels, where logprob_C is by the sampler's; else None."""


def divided(values_C: Tensor | None, batches: list[PackedBatch]) -> Sequence[Tensor | None]:
    """Each batch's own of what is known of all their tokens."""
    if values_C is None:
        return [None] * len(batches)
    return values_C.split([len(batch.targets_C) for batch in batches])


def regrouped(readings: list[Reading], batches: list[PackedBatch]) -> list[Reading]:
    """The same readings for the same sampled tokens, packed in another way."""
    lengths = [len(batch.targets_C) for batch in batches]
    if [len(reading.logprob_C) for reading in readings] == lengths:
        return readings

    def split(parts_C: list[Tensor | None]) -> Sequence[Tensor | None]:
        found_C = [part_C for part_C in parts_C if part_C is not None]
        return divided(torch.cat(found_C) if found_C else None, batches)

    logprobs = split([r.logprob_C for r in readings])
    entropies = split([r.entropy_C for r in readings])
    references = split([r.reference_C for r in readings])
    owns = split([r.own_C for r in readings])
    return [
        Reading(batch=batch, logprob_C=logprob_C, entropy_C=entropy_C, reference_C=reference_C, own_C=own_C)
        for batch, logprob_C, entropy_C, reference_C, own_C in zip(
            batches, logprobs, entropies, references, owns, strict=True
        )
        if logprob_C is not None and entropy_C is not None
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What a batch contributed to one update."""

    before: Reading
    loss: Tensor
    ratio_C: Tensor
    held_C: Tensor
    """The share of each token's gradient that the policy loss held back."""
    correction: Correction
    kl_C: Tensor | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One planned optimizer update."""

    lessons: list[Lesson]
    """Empty where there was nothing to learn: the update was skipped."""
    grad_norm: float | None
    """Before clipping. None where nothing was applied: no lessons, or a norm that was not finite."""
    learning_rate: float


def sampling_metrics(first: list[Reading]) -> dict[str, float]:
    """The learner against the sampler, from the step's first pass."""
    metrics: dict[str, float] = {"learn_tokens": sum(len(reading.batch.tokens_T) for reading in first)}
    if not first:
        return metrics
    sampler_C = torch.cat([reading.batch.sampler_logprobs_C for reading in first])
    metrics |= {"entropy": _mean([reading.entropy_C for reading in first])}
    metrics |= {"sampler_entropy": -sampler_C.mean().item()}
    metrics |= _mismatch("mismatch", sampler_C, [reading.logprob_C for reading in first])
    metrics |= _by_length(first)
    owns = [reading.own_C for reading in first if reading.own_C is not None]
    return metrics | (_mismatch("own_mismatch", sampler_C, owns) if owns else {})


def _mismatch(name: str, sampler_C: Tensor, learner: list[Tensor]) -> dict[str, float]:
    learner_C = torch.cat(learner)
    distance_C = (learner_C - sampler_C).abs()
    return {
        f"{name}_abs": distance_C.mean().item(),
        f"{name}_max": distance_C.max().item(),
        f"{name}_kl": k3(sampler_C, learner_C).mean().item(),
    }


def _by_length(readings: list[Reading]) -> dict[str, float]:
    """Long samples are where a mismatch of tokens adds up (Jet-RL, arXiv 2601.14243)."""
    early, late, samples = [], [], []
    for reading in readings:
        spans = reading.batch.spans
        d_C = reading.logprob_C - reading.batch.sampler_logprobs_C
        quarter_C = 4 * (spans.places_T % max(spans.longest, 1)) // spans.per_token(spans.lengths_S)
        early.append(d_C[quarter_C == 0].abs())
        late.append(d_C[quarter_C == 3].abs())
        samples.append(spans.total(d_C).abs())
    parts = {"early": early, "late": late, "sample": samples}
    return {f"mismatch_{name}": _mean(each) for name, each in parts.items() if sum(map(len, each))}


def update_metrics(updates: list[Update]) -> dict[str, float]:
    """The step's updates; means over those that happened, or over their tokens."""
    applied = [u for u in updates if u.grad_norm is not None]
    metrics: dict[str, float] = {
        "learning_rate": updates[-1].learning_rate,
        "skipped_updates": sum(not u.lessons for u in updates),
        "nonfinite_updates": sum(bool(u.lessons) and u.grad_norm is None for u in updates),
    }
    lessons = [lesson for u in applied for lesson in u.lessons]
    if not applied:
        return metrics
    metrics |= {
        "loss": sum(lesson.loss.item() for lesson in lessons) / len(applied),
        "grad_norm": sum(u.grad_norm for u in applied if u.grad_norm is not None) / len(applied),
        "ratio_mean": _mean([lesson.ratio_C for lesson in lessons]),
        "clip_fraction": _mean([lesson.held_C for lesson in lessons]),
        **_correction_metrics([lesson.correction for lesson in lessons]),
    }
    kl = [lesson.kl_C for lesson in lessons if lesson.kl_C is not None]
    return metrics | ({"kl_reference": _mean(kl)} if kl else {})


def _correction_metrics(corrections: list[Correction]) -> dict[str, float]:
    weight_C = torch.cat([correction.weight_T for correction in corrections])
    metrics = {
        "importance_weight_mean": weight_C.mean().item(),
        "capped_fraction": _mean([correction.was_capped_T for correction in corrections]),
        "masked_fraction": _mean([correction.was_masked_T for correction in corrections]),
        "rejected_fraction": _mean([correction.was_rejected_S for correction in corrections]),
    }
    effective = effective_fraction(weight_C).item()
    return metrics | ({"effective_fraction": effective} if math.isfinite(effective) else {})


def _mean(parts_C: list[Tensor]) -> float:
    return torch.cat(parts_C).float().mean().item()
