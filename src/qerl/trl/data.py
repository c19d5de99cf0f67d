"""Write a trainer's rows to files named by their hash, so that a run is not resumed with other rows."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qerl.errors import UserError, naming, require
from qerl.tasks.rows.messages import BadRow, join_text_parts
from qerl.tracking.atomic_file import write_atomic

IMAGES = ("image", "images")
_UNREAD = ("id", "index", "annotations", "meta", "_meta", "extras")
"""Keys that MCP and LangChain put beside a text; no model reads them."""


def are_blocks(content: Any) -> bool:
    """True if this is what a message has in place of a text: a list of {"type": ...}."""
    is_list = isinstance(content, list) and len(content) > 0
    return is_list and all(isinstance(block, Mapping) and "type" in block for block in content)


def joined(blocks: list[Mapping[str, Any]]) -> str:
    """Return the text of blocks; raise UserError for an image and the like."""
    for block in blocks:
        kind = block["type"]
        require(kind == "text", f"a block of type {kind}: only texts are supported, no vision models")
    try:
        return join_text_parts(blocks, "blocks", _UNREAD)
    except BadRow as fault:
        raise UserError(str(fault)) from None


def _with_texts(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with messages whose content is a text."""

    def message(each: Any) -> Any:
        is_message = isinstance(each, Mapping) and are_blocks(each.get("content"))
        return {**each, "content": joined(each["content"])} if is_message else each

    with naming(name):
        return {
            column: [message(each) for each in value] if isinstance(value, list) else value
            for column, value in row.items()
        }


def write_rows(name: str, rows: Iterable[dict[str, Any]], folder: Path, *, limit: int | None = None) -> Path:
    """Write `limit` rows, or all, to <folder>/<kind>-<hash>.jsonl; name: train_dataset or eval_dataset."""
    rows = [_with_texts(name, row) for row in itertools.islice(rows, limit)]
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
