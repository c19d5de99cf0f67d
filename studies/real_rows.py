"""Rows of real data sets: parts of the files in `--files FOLDER`, which a run writes to its own folder.

    mbpp/train, mbpp/test         tasks 601 to 974, and 11 to 510: the parts of its authors
    humaneval                     all tasks
    math/HASH/train, .../test     problems that the untrained model solves sometimes, at most 128 for tests

The last are chosen by `python -m studies select`, which samples 32 answers to problems of levels 3 to 5 and
stores a line for each in math_exploration/solved.jsonl: {"split": "train", "row": 17, "solved": 3}. Those
with 1 to 4 right answers are taken. HASH is of the rows taken, so that a run's digest depends on them.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl.errors import UserError, require

SOLVED = Path(__file__).with_name("math_exploration") / "solved.jsonl"
NUM_SAMPLES, MIN_SOLVED, MAX_SOLVED, MAX_TEST = 32, 1, 4, 128
Row = dict[str, Any]
Keep = Callable[[int, Row], bool]
_PARTS: dict[str, tuple[str, Keep]] = {
    "mbpp/train": ("mbpp/mbpp.jsonl", lambda _, row: 601 <= row["task_id"] <= 974),
    "mbpp/test": ("mbpp/mbpp.jsonl", lambda _, row: 11 <= row["task_id"] <= 510),
    "humaneval": ("humaneval/humaneval.jsonl", lambda _, row: True),
}
"""By name: the file, and which of its rows by their index."""


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def solved_rows() -> dict[str, list[int]]:
    """Return the rows of each split that the untrained model solves sometimes, in the order of the file."""
    rows: dict[str, list[int]] = {"train": [], "test": []}
    for entry in read_rows(SOLVED) if SOLVED.exists() else ():
        if MIN_SOLVED <= entry["solved"] <= MAX_SOLVED:
            rows[entry["split"]].append(entry["row"])
    return rows | {"test": rows["test"][:MAX_TEST]}


def solved_names() -> tuple[str, str]:
    """Return the names of the two parts of MATH."""
    text = json.dumps(solved_rows(), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"math/{digest}/train", f"math/{digest}/test"


def write_rows(name: str, files: Path, folder: Path) -> Path:
    """Write the rows of this name to the folder and return the file. files: the folder of the data sets."""
    parts = dict(_PARTS)
    for split, part in zip(("train", "test"), solved_names(), strict=True):
        taken = frozenset(solved_rows()[split])
        parts[part] = f"math/{split}.jsonl", lambda index, row, taken=taken: index in taken
    require(name in parts, f"there are no rows {name}; there are {', '.join(parts)}")
    source, keep = files / parts[name][0], parts[name][1]
    if not source.exists():
        raise UserError(f"--files {files}: no {source}")
    kept = [row for index, row in enumerate(read_rows(source)) if keep(index, row)]
    require(bool(kept), f"{name} has no rows: choose them by `python -m studies select --files {files}`")
    path = folder / f"{name.replace('/', '-')}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path
