"""Read and write a study's lines: results.jsonl, and choice.jsonl for the learning rates.

    {"study": "growth", "task": "add", "arm": "nvfp4", "seed": 0, "learning_rate": 0.0005,
     "final": {"accuracy_after": 0.87, ...}, "curve": [{"step": 0, "reward": 0.04, ...}, ...],
     "digest": "...", "commit": "...", "is_dirty": false, "device": "...", "seconds": 31.2, "workers": 1}

workers is the number of runs at the same time on the line's device: its seconds depend on it.
The file is rewritten in the study's own order whenever a run ends, so it does not depend on which run ends
first. A resumed study starts from it; a line whose config differs from the study's is refused. A line taken
from another study (`Study.takes_from`) has that study's name.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl.errors import UserError
from qerl.tracking.atomic_file import encode, write_atomic
from studies.study import Job

Line = dict[str, Any]
Key = tuple[str, str, int, float]


def key_of(job: Job) -> Key:
    return job.task, job.arm, job.seed, job.rate


def has_own_gpu(line: Line) -> bool:
    """True if no other run of the study shared the run's GPU: only then do its seconds count."""
    return line["workers"] == 1


def num_at_once(lines: Sequence[Line]) -> str:
    """Return how many runs shared one device: "3", "3 to 6"."""
    numbers = {line["workers"] for line in lines}
    return " to ".join(str(n) for n in sorted({min(numbers), max(numbers)}))


class Results:
    """One of the two files, with its lines in memory."""

    def __init__(self, path: Path):
        self.path = path
        self._lines: dict[Key, Line] = {}
        for number, text in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
            try:
                line = json.loads(text)
                key = (line["task"], line["arm"], line["seed"], line["learning_rate"])
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}: line {number} is damaged") from None
            self._lines[key] = line

    def of(self, job: Job) -> Line | None:
        line = self._lines.get(key_of(job))
        if line is not None and line["digest"] != job.digest:
            raise UserError(
                f"{self.path}: {job.task}, {job.arm}, seed {job.seed} was run with another config;"
                " delete its line, or choose another folder with --out"
            )
        return line

    def lines_of(self, jobs: list[Job]) -> list[Line]:
        """Return the existing lines in the order of the jobs."""
        return [line for job in jobs if (line := self.of(job)) is not None]

    def take(self, other: "Results", jobs: list[Job]) -> None:
        """Add the other study's lines of these jobs' configs where there is none. They keep its name."""
        by_digest = {line["digest"]: line for line in other._lines.values()}
        for job in jobs:
            if self.of(job) is None and (line := by_digest.get(job.digest)):
                self.add(job, {**line, "task": job.task, "arm": job.arm}, jobs)

    def add(self, job: Job, line: Line, jobs: list[Job]) -> None:
        """Add a line and rewrite the file: the lines of these jobs in their order, then all others."""
        self._lines[key_of(job)] = line
        keys = [key for job in jobs if (key := key_of(job)) in self._lines]
        keys += [key for key in self._lines if key not in set(keys)]
        write_atomic(self.path, b"".join(encode(self._lines[key]) + b"\n" for key in keys))
