"""Reads what the journal left in a run's folder, as far as it is whole.

A damaged line is left out and told in `notices`; only a folder that is no run's is refused. Of the samples,
those of the newest steps and of steps spread evenly over the rest are taken, as many as a page can carry.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qerl.errors import UserError
from qerl.tracking.atomic_file import decode

_MOST_CHARACTERS = 20_000
"""Of one prompt or sample."""

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """One run's files; what is missing there is empty here."""

    name: str
    facts: dict[str, Any]
    """run.json"""
    result: dict[str, Any]
    """result.json"""
    evaluations: dict[str, Any]
    """evaluations.json: {"before": {"accuracy": 0.1, "greedy": 0.2}, "after": ...}"""
    records: list[dict[str, Any]]
    """metrics.jsonl, in order."""
    groups: list[dict[str, Any]]
    """[{"step": 3, "prompt_index": 17, "prompt": "...", "answer": "3", "samples": [{"text": ...}]}]"""
    notices: list[str]
    """What is wrong with the files."""
    coverage: list[str]
    """Which samples were taken, if not all."""

    def points(self, key: str) -> Points:
        """(step, value) wherever the value is a number."""
        pairs = [(record["step"], number(record.get(key))) for record in self.records]
        return [(float(step), value) for step, value in pairs if value is not None]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.points(key)]


def number(value: Any) -> float | None:
    """The value if it is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def read_run(folder: Path, name: str, *, max_samples: int) -> RecordedRun:
    check_folder(folder)
    notices: list[str] = []
    parts = {part: read_object(folder / f"{part}.json", notices) for part in ("run", "result", "evaluations")}
    records = [record for _, record in _lines(folder / "metrics.jsonl", notices)]
    if not records:
        notices.append("metrics.jsonl: no step has finished yet")
    groups, coverage = _groups(folder / "samples.jsonl", notices, max_samples)
    return RecordedRun(
        name=name,
        facts=parts["run"],
        result=parts["result"],
        evaluations=parts["evaluations"],
        records=records,
        groups=groups,
        notices=notices,
        coverage=coverage,
    )


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def check_folder(folder: Path) -> None:
    if not is_run(folder):
        raise UserError(f"{folder}: holds no metrics.jsonl, so it is no run's folder")


def chosen_steps(steps: list[int], num_chosen: int) -> list[int]:
    """A quarter of them the newest, the others spread evenly from the first on."""
    if len(steps) <= num_chosen:
        return steps
    num_newest = max(1, num_chosen // 4)
    older, num_spread = steps[:-num_newest], num_chosen - num_newest
    spread = [older[i * len(older) // num_spread] for i in range(num_spread)]
    return [*spread, *steps[-num_newest:]]


def read_object(path: Path, notices: list[str]) -> dict[str, Any]:
    """The file's object; empty where there is none, or a damaged one, which is a notice."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notices.append(f"{path.name}: is damaged and left out")
        return {}
    return value


def _lines(path: Path, notices: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where it begins, its object) for each whole line that has a step."""
    begin, num_damaged = 0, 0
    with open(path, "rb") as file:
        for line in file:
            record = decode(line)
            if record is not None and isinstance(record.get("step"), int):
                yield begin, record
            else:
                num_damaged += 1
            begin += len(line)
    if num_damaged:
        notices.append(damaged(path, num_damaged))


def damaged(path: Path, num_lines: int) -> str:
    lines = "1 line is" if num_lines == 1 else f"{num_lines} lines are"
    return f"{path.name}: {lines} damaged and left out"


def _groups(path: Path, notices: list[str], max_samples: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Groups, and a remark where some are left out."""
    begins: dict[int, list[int]] = {}
    for begin, record in _lines(path, notices) if path.exists() else ():
        begins.setdefault(record["step"], []).append(begin)
    if not begins:
        return [], []
    most = max(map(len, begins.values()))
    steps = chosen_steps(sorted(begins), max(1, max_samples // most))
    kept = [begin for step in steps for begin in begins[step][:max_samples]]
    num_samples = sum(map(len, begins.values()))
    remark = (
        f"{len(kept)} samples of {len(steps)} steps are on this page, the newest and others spread evenly;"
        f" all {num_samples} of {len(begins)} steps are in samples.jsonl"
    )
    return groups_at(path, kept), [remark] if len(kept) < num_samples else []


def groups_at(path: Path, begins: Sequence[int]) -> list[dict[str, Any]]:
    """The groups of the samples whose lines begin there."""
    groups: dict[tuple[int, Any], dict[str, Any]] = {}
    with open(path, "rb") as file:
        for begin in begins:
            file.seek(begin)
            record = decode(file.readline())
            if record is not None and "step" in record:  # a run that goes back has cut it meanwhile
                _add_sample(groups, record)
    return list(groups.values())


def _add_sample(groups: dict[tuple[int, Any], dict[str, Any]], record: dict[str, Any]) -> None:
    key = record["step"], str(record.get("prompt_index"))
    if key not in groups:
        groups[key] = {
            "step": record["step"],
            "prompt_index": key[1],
            "prompt": _shortened(record.get("prompt", "")),
            "answer": None if record.get("answer") is None else _shortened(record["answer"]),
            "samples": [],
        }
    groups[key]["samples"].append(
        {
            "text": _shortened(record.get("text", "")),
            "reward": number(record.get("reward")),
            "advantage": number(record.get("advantage")),
            "finish": str(record.get("finish", "")),
            "num_tokens": number(record.get("num_tokens")),
            "prefix_tokens": number(record.get("prefix_tokens")),
        }
    )


def _shortened(value: Any) -> str:
    text = str(value)
    left_out = len(text) - _MOST_CHARACTERS
    return (
        text if left_out <= 0 else f"{text[:_MOST_CHARACTERS]}\n[{left_out} more characters in samples.jsonl]"
    )
