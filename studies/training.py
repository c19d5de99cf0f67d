"""Measure a training run of a study: held-out accuracy, reward and entropy, and their curves.

reward_first   step 0, before any update          reward_last   mean of the last tenth of the steps
reward_mean    over all steps                     reward_drop   best tenth (a running mean) - reward_last
elapsed_s      seconds in steps up to the end of this one, with their evaluations, without loading
"""

import itertools
import json
from statistics import fmean
from typing import Any

from qerl import train
from qerl.config import RunConfig
from studies.study import Job

_LOGGED = (
    "reward",
    "accuracy",
    "entropy",
    "mismatch_kl",
    "informative",
    "distinct",
    "sigma",
    "clip_fraction",
)


def train_job(job: Job, config: RunConfig | None = None, logged: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the job, or resume it, and return its line's `final` and `curve`. config: the job's with other
    paths of its files; logged: metrics of the curve beside the usual ones."""
    assert job.weights == "plain", job
    result = train(config or job.config)
    text = (job.folder / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    curve = curve_of(records, _LOGGED + logged)
    accuracies = {
        key: value
        for key, value in result.items()
        if key.startswith(("accuracy", "greedy_before", "greedy_after"))
    }
    return {"final": {**accuracies, **summary(curve), "train_s": result["train_s"]}, "curve": curve}


def curve_of(records: list[dict[str, Any]], logged: tuple[str, ...] = _LOGGED) -> list[dict[str, Any]]:
    elapsed = itertools.accumulate(record["step_s"] for record in records)
    return [
        {
            "step": record["step"],
            **{key: float(f"{record[key]:.6g}") for key in logged if record.get(key) is not None},
            "elapsed_s": round(seconds, 3),
        }
        for record, seconds in zip(records, elapsed, strict=True)
    ]


def summary(curve: list[dict[str, Any]]) -> dict[str, float]:
    rewards = [point["reward"] for point in curve]
    tenth = max(1, len(rewards) // 10)
    running = [fmean(rewards[i : i + tenth]) for i in range(len(rewards) - tenth + 1)]
    entropies = [point["entropy"] for point in curve if "entropy" in point]
    figures = {
        "reward_first": rewards[0],
        "reward_mean": fmean(rewards),
        "reward_last": running[-1],
        "reward_drop": max(running) - running[-1],
    }
    return figures | ({"entropy_first": entropies[0], "entropy_last": entropies[-1]} if entropies else {})
