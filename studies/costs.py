"""What a run of each arm costs: seconds of a step and of the run, and peak memory.

    step, rollout   median over runs of the run's median over its steps: the first step, which compiles, and
                    those that end with an evaluation do not count
    run             median over runs of all steps, evaluations included
    memory          largest of all runs, 1e9 bytes

Only runs that had a GPU of their own count (results.py).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from statistics import median

from studies import verdict
from studies.results import Line, has_own_gpu, num_at_once
from studies.study import Study

COLUMNS = ("runs", "step, s", "of it sampling, s", "all steps, s", "peak memory, GB")
RULE = (
    "Medians over the runs that had a GPU to themselves; a run's step is the median of its steps. Peak memory"
    " is the largest of these runs, where there was room: learning keeps unpacked weights in free memory, so"
    " it is no lower bound (`qerl plan` has one)."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost(task="gsm8k-0.5b", arm="nvfp4", num_runs=7, step_s=2.2, rollout_s=1.3, run_s=99.1, peak_gb=17.8);
    without runs the figures are None."""

    task: str
    arm: str
    num_runs: int
    step_s: float | None
    rollout_s: float | None
    run_s: float | None
    peak_gb: float | None


def costs(study: Study, lines: Sequence[Line]) -> list[Cost]:
    """Return a row for each task and arm that was run; none if no run with the seconds of its steps had a
    GPU to itself."""
    timed = _timed(lines)
    rows = [
        _cost(task.name, arm.name, of_arm)
        for task in study.tasks
        for arm in study.arms
        if (of_arm := [line for line in timed if (line["task"], line["arm"]) == (task.name, arm.name)])
    ]
    return rows if any(row.num_runs for row in rows) else []


def _timed(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that have the seconds of their steps."""
    return [line for line in lines if any("step_s" in point for point in line["curve"])]


def _cost(task: str, arm: str, lines: Sequence[Line]) -> Cost:
    alone = [line for line in lines if has_own_gpu(line)]
    if not alone:
        return Cost(task=task, arm=arm, num_runs=0, step_s=None, rollout_s=None, run_s=None, peak_gb=None)
    return Cost(
        task=task,
        arm=arm,
        num_runs=len(alone),
        step_s=median(_medians(alone, "step_s")),
        rollout_s=median(_medians(alone, "rollout_s")),
        run_s=median(line["final"]["train_s"] for line in alone),
        peak_gb=max(point["memory_gb"] for line in alone for point in line["curve"]),
    )


def _medians(lines: Sequence[Line], key: str) -> Iterator[float]:
    return (median(point[key] for point in line["curve"]) for line in lines)


def cells(cost: Cost) -> tuple[str, ...]:
    """Return the texts of COLUMNS."""
    if cost.step_s is None or cost.rollout_s is None or cost.run_s is None or cost.peak_gb is None:
        return ("0", *["not measured alone"] * 4)
    seconds = f"{cost.step_s:.2f}", f"{cost.rollout_s:.2f}", f"{cost.run_s:.0f}"
    return (str(cost.num_runs), *seconds, f"{cost.peak_gb:.1f}")


def left_out(lines: Sequence[Line]) -> str:
    """Return what was left out, or nothing."""
    shared = [line for line in lines if not has_own_gpu(line)]
    if not shared:
        return ""
    seeds = sorted({line["seed"] for line in shared})
    numbers = ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))
    return (
        f"Not counted: {len(shared)} runs ({numbers}), {num_at_once(shared)} of which shared a GPU at a time;"
        " their seconds are in no table and in no curve by time."
    )


def markdown(study: Study, lines: Sequence[Line]) -> list[str]:
    """Return the lines of the table with its notes; without rows what was left out, if runs had steps."""
    rows = costs(study, lines)
    if not rows:
        return [left_out(lines), ""] if _timed(lines) else []
    table = verdict.markdown(("task", "arm", *COLUMNS), [(row.task, row.arm, *cells(row)) for row in rows])
    notes = [note for text in (RULE, left_out(lines)) if text for note in (text, "")]
    return ["Seconds and memory:", "", *table, "", *notes]
