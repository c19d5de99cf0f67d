"""What the lines of a study say: an estimate for each arm, paired differences, and a verdict on each claim.

    difference   arm - other, seed by seed; over all tasks the pairs are (task, seed)
    p            of a claim: exact sign-flip test over all pairs, corrected by Holm over its family of claims;
                 in a table, where a task's few pairs leave an exact test without power: Student's paired t,
                 corrected over all rows of the metric
    interval     over all tasks: of each seed's mean over the tasks, Student's t

    held       p < 0.05, and the difference has the claimed sign in every task
    mixed      p < 0.05, the claimed sign over all, not in every task
    opposite   p < 0.05, and the other sign
    depends    p >= 0.05, and the 95 % intervals of two tasks are on opposite sides of 0
    not shown  p >= 0.05 else; where no result of so few pairs could have been below it, that is said

`matched` compares arms from equal first rewards. For each task the level is the highest mean first reward of
any arm. A run is read from the step on at which the mean of its last 3 rewards reaches that level, for half
of its steps. One that gets there in its second half is read from the middle on, before it is there: that
counts against it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from studies.results import Line
from studies.statistics import Estimate, Paired, estimate, holm, paired
from studies.study import Claim, Study

Verdict = Literal["held", "mixed", "opposite", "depends", "not shown", "not measured"]
Values = dict[tuple[str, str], dict[int, float]]
"""By (task, arm), then by seed."""
LEVEL_OF_PROOF = 0.05
_REACHED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A claim with its evidence; `over_all` is None where nothing was measured."""

    claim: Claim
    verdict: Verdict
    over_all: Paired | None
    by_task: dict[str, Paired]
    num_pairs: int
    p: float | None
    """Corrected."""
    smallest_p: float | None
    """What the corrected p could have been at best with so many pairs, the family's others as they are."""

    @property
    def has_too_few_pairs(self) -> bool:
        """Whether nothing that so few might have given would have been proof."""
        return self.smallest_p is not None and self.smallest_p >= LEVEL_OF_PROOF


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An arm in a task's table; compared is None for the baseline and where there is no pair."""

    task: str
    arm: str
    estimate: Estimate
    compared: Paired | None
    p: float | None
    """Of Student's paired t, corrected over all rows of the metric; None without spread."""


def values_of(lines: Sequence[Line], metric: str) -> Values:
    """Runs without the metric are left out."""
    if metric in DERIVED:
        return DERIVED[metric](lines)
    found: Values = {}
    for line in lines:
        if line["final"].get(metric) is not None:
            found.setdefault((line["task"], line["arm"]), {})[line["seed"]] = line["final"][metric]
    return found


def matched(lines: Sequence[Line]) -> Values:
    """Mean reward from the common level on; see above."""
    found: Values = {}
    for task in dict.fromkeys(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == task and line["curve"]]
        firsts: dict[str, list[float]] = {}
        for line in own:
            firsts.setdefault(line["arm"], []).append(line["curve"][0]["reward"])
        level = max((fmean(values) for values in firsts.values()), default=0.0)
        for line in own:
            rewards = [point["reward"] for point in line["curve"]]
            found.setdefault((task, line["arm"]), {})[line["seed"]] = matched_mean(rewards, level)
    return found


def matched_mean(rewards: Sequence[float], level: float) -> float:
    half = max(1, len(rewards) // 2)
    starts = range(len(rewards) - half + 1)
    reached = (s for s in starts if fmean(rewards[max(0, s + 1 - _REACHED_STEPS) : s + 1]) >= level)
    start = next(reached, starts[-1])
    return fmean(rewards[start : start + half])


DERIVED: Mapping[str, Callable[[Sequence[Line]], Values]] = {"matched": matched}


def differences(values: Values, task: str, arm: str, against: str) -> dict[int, float]:
    """By seed, where both arms have it."""
    ours, theirs = values.get((task, arm), {}), values.get((task, against), {})
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def table(study: Study, lines: Sequence[Line], metric: str) -> list[Row]:
    """A row for each task and arm that was measured."""
    values = values_of(lines, metric)
    rows: list[tuple[str, str, Paired | None]] = []
    for task in study.tasks:
        for arm in study.arms:
            if (task.name, arm.name) in values:
                pairs = differences(values, task.name, arm.name, study.baseline)
                is_compared = arm.name != study.baseline and bool(pairs)
                rows.append((task.name, arm.name, paired(list(pairs.values())) if is_compared else None))
    p_values = [found.p_t for _, _, found in rows if found is not None and found.p_t is not None]
    corrected = iter(holm(p_values))
    return [
        Row(
            task=task,
            arm=arm,
            estimate=estimate(list(values[task, arm].values())),
            compared=found,
            p=None if found is None or found.p_t is None else next(corrected),
        )
        for task, arm, found in rows
    ]


def judge(study: Study, lines: Sequence[Line]) -> list[Judged]:
    """Every claim of the study, measured or not."""
    evidence = [_evidence(study, lines, claim) for claim in study.claims]
    p_values: dict[str, list[float]] = {}
    for claim, (over_all, _, _) in zip(study.claims, evidence, strict=True):
        if over_all is not None:
            p_values.setdefault(claim.family, []).append(over_all.p_exact)
    places, judged = Counter[str](), []
    for claim, (over_all, by_task, num_pairs) in zip(study.claims, evidence, strict=True):
        p, smallest = None, None
        if over_all is not None:
            own, place = p_values[claim.family], places[claim.family]
            best = [*own[:place], 2.0 ** (1 - num_pairs), *own[place + 1 :]]
            p, smallest = holm(own)[place], holm(best)[place]
            places[claim.family] += 1
        judged.append(
            Judged(
                claim=claim,
                verdict=_verdict(claim, over_all, by_task, p),
                over_all=over_all,
                by_task=by_task,
                num_pairs=num_pairs,
                p=p,
                smallest_p=smallest,
            )
        )
    return judged


def _evidence(
    study: Study, lines: Sequence[Line], claim: Claim
) -> tuple[Paired | None, dict[str, Paired], int]:
    values = values_of(lines, claim.metric)
    pairs = {task.name: differences(values, task.name, claim.arm, claim.against) for task in study.tasks}
    pairs = {task: by_seed for task, by_seed in pairs.items() if by_seed}
    if not pairs:
        return None, {}, 0
    everything = [d for by_seed in pairs.values() for d in by_seed.values()]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in pairs.values())))
    means = [fmean(by_seed[seed] for by_seed in pairs.values()) for seed in seeds] or everything
    over_all = dataclasses.replace(paired(means), p_exact=paired(everything).p_exact)
    return over_all, {task: paired(list(d.values())) for task, d in pairs.items()}, len(everything)


def _verdict(claim: Claim, over_all: Paired | None, by_task: dict[str, Paired], p: float | None) -> Verdict:
    if over_all is None or p is None:
        return "not measured"
    if p >= LEVEL_OF_PROOF:
        sides = {_side(found.difference) for found in by_task.values()}
        return "depends" if {-1, 1} <= sides else "not shown"
    if over_all.difference.mean * claim.sign < 0:
        return "opposite"
    agrees = all(found.difference.mean * claim.sign > 0 for found in by_task.values())
    return "held" if agrees else "mixed"


def _side(found: Estimate) -> int:
    """Of 0, that the whole interval is on; 0 where it is on both."""
    if found.low is None or found.high is None:
        return 0
    return (found.low > 0) - (found.high < 0)


def bands(lines: Sequence[Line], x: str, y: str) -> list[tuple[float, Estimate]]:
    """The curve of one arm over its seeds: where x is a step, by step; where it is a time, on an even grid
    up to the earliest end, each seed's value taken from the line between its neighbouring points."""
    curves = [[(p[x], p[y]) for p in line["curve"] if p.get(y) is not None and x in p] for line in lines]
    curves = [curve for curve in curves if curve]
    if not curves:
        return []
    grid = sorted(set.intersection(*({point[0] for point in curve} for curve in curves)))
    if x.endswith("_s") and len(curves) > 1:
        first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
        num = max(len(curve) for curve in curves)
        grid = [first + (last - first) * i / max(1, num - 1) for i in range(num)] if first < last else []
    return [(at, estimate([_between(curve, at) for curve in curves])) for at in grid]


def _between(curve: Sequence[tuple[float, float]], x: float) -> float:
    behind = next((i for i, (at, _) in enumerate(curve) if at >= x), len(curve) - 1)
    (x1, y1), (x0, y0) = curve[behind], curve[max(0, behind - 1)]
    return y1 if x1 == x0 or x >= x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def facts(lines: Sequence[Line]) -> dict[str, Any]:
    """Where the lines come from."""
    return {
        "runs": len(lines),
        "commits": sorted({str(line["commit"])[:10] + ("+" if line["is_dirty"] else "") for line in lines}),
        "devices": sorted({str(line["device"]) for line in lines}),
        "seconds": sum(line["seconds"] for line in lines),
        "workers": sorted({line["workers"] for line in lines}),
    }
