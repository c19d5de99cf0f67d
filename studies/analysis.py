"""Turn the lines of a study into an estimate for each arm, paired differences, and a verdict on each claim.

    difference   arm - against, at the same task and seed
    unit         what is independent: a difference of one (task, seed); of arms with weights that are drawn by
                 seed and shared by the tasks, one seed's mean difference over the tasks
    p            of a claim: exact sign-flip test over its units, Holm-corrected over its family of claims;
                 in a table, where an exact test of a task's few pairs has no power: Student's paired t test,
                 corrected over all rows of the metric
    interval     of each seed's mean difference over the tasks, Student's t
    seconds      metrics and curves in _s are read from runs that had a GPU of their own, from no others

    supported  p < 0.05, and the difference has the claimed sign in every task
    mixed      p < 0.05 and the claimed sign overall, but not in every task
    refuted    p < 0.05, and the opposite sign overall
    depends    p >= 0.05, and the 95 % intervals of two tasks are on opposite sides of 0
    not shown  p >= 0.05 otherwise; if no outcome of so few units could have had p < 0.05, the text says so

`matched` compares arms from equal first rewards. The level of a task is the highest mean first reward of any
arm. A run is read from the step at which the mean of its last 3 rewards reaches that level, for half of its
steps. A run that reaches it in its second half, or never, is read from the middle on, below the level: that
counts against it.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any, Literal

from studies.results import Line, has_own_gpu
from studies.statistics import Estimate, Paired, estimate, exact_p, holm, paired
from studies.study import Claim, Curve, Study

Verdict = Literal["supported", "mixed", "refuted", "depends", "not shown", "not run"]
Values = dict[tuple[str, str], dict[int, float]]
"""By (task, arm), then by seed."""
SIGNIFICANCE = 0.05
SECONDS = "_s"
"""End of the names of figures in seconds."""
_REACHED_STEPS = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The paired differences of a claim."""

    over_all: Paired
    by_task: dict[str, Paired]
    num_units: int
    p: float
    """The p-value of the exact test, not corrected."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """Another metric of a claim's two arms, in one task; no test is made of it."""

    task: str
    metric: str
    arm: Estimate
    against: Estimate
    difference: Estimate


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A claim with its verdict; `evidence` is None if nothing was measured."""

    claim: Claim
    verdict: Verdict
    evidence: Evidence | None
    p: float | None
    """Corrected."""
    smallest_p: float | None
    """Smallest corrected p that this many units could give, the other p values of the family unchanged."""
    first_look_p: float | None
    """Corrected p of the seeds that were read before more were added; None if none were added."""
    side_results: tuple[SideResult, ...]

    @property
    def is_decided(self) -> bool:
        return self.verdict in ("supported", "mixed", "refuted")

    @property
    def has_too_few_units(self) -> bool:
        """True if no outcome of so few units could have been significant."""
        return self.smallest_p is not None and self.smallest_p >= SIGNIFICANCE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An arm in a task's table; compared is None for the baseline and where there is no pair."""

    task: str
    arm: str
    estimate: Estimate
    compared: Paired | None
    p: float | None
    """Student's paired t, corrected over all rows of the metric; None without spread."""


def values_of(lines: Sequence[Line], metric: str) -> Values:
    """Return a metric of the runs that have it; seconds only of those that had a GPU of their own."""
    if metric.endswith(SECONDS):
        lines = [line for line in lines if has_own_gpu(line)]
    if metric in DERIVED:
        return DERIVED[metric](lines)
    values: Values = {}
    for line in lines:
        if line["final"].get(metric) is not None:
            values.setdefault((line["task"], line["arm"]), {})[line["seed"]] = line["final"][metric]
    return values


def matched(lines: Sequence[Line]) -> Values:
    """Return each run's mean reward from the common level on (module docstring)."""
    values: Values = {}
    for task in dict.fromkeys(line["task"] for line in lines):
        of_task = [line for line in lines if line["task"] == task and line["curve"]]
        firsts: dict[str, list[float]] = {}
        for line in of_task:
            firsts.setdefault(line["arm"], []).append(line["curve"][0]["reward"])
        level = max((fmean(rewards) for rewards in firsts.values()), default=0.0)
        for line in of_task:
            rewards = [point["reward"] for point in line["curve"]]
            values.setdefault((task, line["arm"]), {})[line["seed"]] = matched_mean(rewards, level)
    return values


def matched_mean(rewards: Sequence[float], level: float) -> float:
    half = max(1, len(rewards) // 2)
    starts = range(len(rewards) - half + 1)
    reached = (s for s in starts if fmean(rewards[max(0, s + 1 - _REACHED_STEPS) : s + 1]) >= level)
    start = next(reached, starts[-1])
    return fmean(rewards[start : start + half])


def gained(lines: Sequence[Line]) -> Values:
    """Return each run's reward of its last tenth of the steps minus that of its first step."""
    values: Values = {}
    for line in lines:
        final = line["final"]
        if "reward_first" in final and "reward_last" in final:
            gain = final["reward_last"] - final["reward_first"]
            values.setdefault((line["task"], line["arm"]), {})[line["seed"]] = gain
    return values


def of_curve(key: str, lines: Sequence[Line]) -> Values:
    """Return each run's mean over its steps of a metric of the curve; runs without it are left out. Of
    seconds the median: the first step, which compiles, and those with an evaluation do not count."""
    middle = median if key.endswith(SECONDS) else fmean
    values: Values = {}
    for line in lines:
        points = [point[key] for point in line["curve"] if point.get(key) is not None]
        if points:
            values.setdefault((line["task"], line["arm"]), {})[line["seed"]] = middle(points)
    return values


DERIVED: Mapping[str, Callable[[Sequence[Line]], Values]] = {
    "matched": matched,
    "gain": gained,
    **{key: partial(of_curve, key) for key in ("mismatch_kl", "mismatch_abs", "rollout_s", "step_s")},
}


def differences(values: Values, task: str, arm: str, against: str) -> dict[int, float]:
    """Return the differences by seed, for the seeds that both arms have."""
    ours, theirs = values.get((task, arm), {}), values.get((task, against), {})
    return {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}


def table(study: Study, lines: Sequence[Line], metric: str) -> list[Row]:
    """Return a row for each task and arm that was measured."""
    values = values_of(lines, metric)
    rows: list[tuple[str, str, Paired | None]] = []
    for task in study.tasks:
        for arm in study.arms:
            if (task.name, arm.name) in values:
                pairs = differences(values, task.name, arm.name, study.baseline)
                is_compared = arm.name != study.baseline and bool(pairs)
                rows.append((task.name, arm.name, paired(list(pairs.values())) if is_compared else None))
    p_values = [compared.p_t for _, _, compared in rows if compared is not None and compared.p_t is not None]
    corrected = iter(holm(p_values))
    return [
        Row(
            task=task,
            arm=arm,
            estimate=estimate(list(values[task, arm].values())),
            compared=compared,
            p=None if compared is None or compared.p_t is None else next(corrected),
        )
        for task, arm, compared in rows
    ]


def judge(study: Study, lines: Sequence[Line]) -> list[Judged]:
    """Return every claim of the study with its verdict, measured or not."""
    evidence = [_evidence(study, lines, claim) for claim in study.claims]
    first_look: list[float | None] = [None] * len(evidence)
    if study.first_look_seeds is not None:
        early = [line for line in lines if line["seed"] < study.first_look_seeds]
        first_look = [p for p, _ in _corrected(study, [_evidence(study, early, c) for c in study.claims])]
    return [
        Judged(
            claim=claim,
            verdict=_verdict(claim, result, p),
            evidence=result,
            p=p,
            smallest_p=smallest,
            first_look_p=first_p,
            side_results=_side_results(lines, claim),
        )
        for claim, result, (p, smallest), first_p in zip(
            study.claims, evidence, _corrected(study, evidence), first_look, strict=True
        )
    ]


def _corrected(
    study: Study, evidence: Sequence[Evidence | None]
) -> list[tuple[float, float] | tuple[None, None]]:
    """Return for each claim its corrected p and the smallest that it could have been."""
    p_values: dict[str, list[float]] = {}
    for claim, result in zip(study.claims, evidence, strict=True):
        if result is not None:
            p_values.setdefault(claim.family, []).append(result.p)
    places, corrected = Counter[str](), []
    for claim, result in zip(study.claims, evidence, strict=True):
        if result is None:
            corrected.append((None, None))
            continue
        family_p, place = p_values[claim.family], places[claim.family]
        best = [*family_p[:place], 2.0 ** (1 - result.num_units), *family_p[place + 1 :]]
        corrected.append((holm(family_p)[place], holm(best)[place]))
        places[claim.family] += 1
    return corrected


def _evidence(study: Study, lines: Sequence[Line], claim: Claim) -> Evidence | None:
    values = values_of(lines, claim.metric)
    pairs = {task.name: differences(values, task.name, claim.arm, claim.against) for task in study.tasks}
    pairs = {task: by_seed for task, by_seed in pairs.items() if by_seed}
    if not pairs:
        return None
    everything = [d for by_seed in pairs.values() for d in by_seed.values()]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in pairs.values())))
    means = [fmean(by_seed[seed] for by_seed in pairs.values()) for seed in seeds] or everything
    units = means if study.shares_weights_over_tasks(claim) else everything
    return Evidence(
        over_all=paired(means),
        by_task={task: paired(list(by_seed.values())) for task, by_seed in pairs.items()},
        num_units=len(units),
        p=exact_p(units),
    )


def _side_results(lines: Sequence[Line], claim: Claim) -> tuple[SideResult, ...]:
    results = []
    for task, metric in claim.side_results:
        values = values_of(lines, metric)
        pairs = differences(values, task, claim.arm, claim.against)
        if pairs:
            arm, against = (estimate(list(values[task, a].values())) for a in (claim.arm, claim.against))
            difference = estimate(list(pairs.values()))
            results.append(
                SideResult(task=task, metric=metric, arm=arm, against=against, difference=difference)
            )
    return tuple(results)


def _verdict(claim: Claim, evidence: Evidence | None, p: float | None) -> Verdict:
    if evidence is None or p is None:
        return "not run"
    if p >= SIGNIFICANCE:
        sides = {_side(compared.difference) for compared in evidence.by_task.values()}
        return "depends" if {-1, 1} <= sides else "not shown"
    if evidence.over_all.difference.mean * claim.sign < 0:
        return "refuted"
    agrees = all(compared.difference.mean * claim.sign > 0 for compared in evidence.by_task.values())
    return "supported" if agrees else "mixed"


def _side(difference: Estimate) -> int:
    """Return the sign of the interval, or 0 if it contains 0."""
    if difference.low is None or difference.high is None:
        return 0
    return (difference.low > 0) - (difference.high < 0)


def bands(lines: Sequence[Line], curve: Curve) -> list[tuple[float, Estimate]]:
    """Return the curve of one arm over its seeds: (mean x, estimate) of each step that all of them have."""
    if curve.x.endswith(SECONDS):
        lines = [line for line in lines if has_own_gpu(line)]
    runs = [points for line in lines if (points := _points(line, curve))]
    if not runs:
        return []
    shared = sorted(set.intersection(*map(set, runs)))
    return [
        (fmean(run[step][0] for run in runs), estimate([run[step][1] for run in runs])) for step in shared
    ]


def _points(line: Line, curve: Curve) -> dict[float, tuple[float, float]]:
    """Return (x, y) by step, or x without steps; with a value before training by steps done."""
    done = int(curve.before is not None)
    points = {
        point.get("step", point[curve.x]) + done: (
            point[curve.x] + done * (curve.x == "step"),
            point[curve.y],
        )
        for point in line["curve"]
        if point.get(curve.y) is not None and curve.x in point
    }
    if points and curve.before is not None and curve.before in line["final"]:
        points[0] = (0.0, line["final"][curve.before])
    return points


def facts(lines: Sequence[Line]) -> dict[str, Any]:
    """Return where the lines come from."""
    return {
        "runs": len(lines),
        "commits": sorted({str(line["commit"])[:10] + ("+" if line["is_dirty"] else "") for line in lines}),
        "devices": sorted({str(line["device"]) for line in lines}),
        "seconds": sum(line["seconds"] for line in lines),
    }
