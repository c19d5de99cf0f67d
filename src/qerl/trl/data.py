"""Write a trainer's rows to files named by their hash, so that a run is not resumed with other rows."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qerl.errors import UserError, require
from qerl.tracking.atomic_file import write_atomic

IMAGES = ("image", "images")


def write_rows(name: str, rows: Iterable[dict[str, Any]], folder: Path, *, limit: int | None = None) -> Path:
    """Write `limit` rows, or all, to <folder>/<kind>-<hash>.jsonl; name: train_dataset or eval_dataset."""
    rows = [dict(row) for row in itertools.islice(rows, limit)]
    require(len(rows) > 0, f"{name} has no rows")
    for column in IMAGES:
        require(column not in rows[0], f"{name} has a column {column!r}: vision models are not supported")
    try:
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    except TypeError as error:
        raise UserError(f"{name}: a column cannot be stored as JSON: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.partition('_')[0]}-{hashlib.sha256(content).hexdigest()[:12]}.jsonl"
    write_atomic(path, content)
    return path
