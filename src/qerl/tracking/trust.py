"""Know which runs this user started: only their run.json may name code that a command imports.

A folder from elsewhere may name any module or file of this machine as a reward. So a run that is started with
rewards of its own leaves an empty file outside its folder, named by the hash of the folder's path and of the
rewards' names; `qerl eval FOLDER` imports them only where that file is, or with --trust.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from qerl.config.cache import cache_folder
from qerl.errors import UserError


def remember_started(folder: Path, rewards: Sequence[str]) -> None:
    """Record that this user started the run; without rewards of its own there is nothing to record."""
    if not _named_code(rewards):
        return
    mark = _mark(folder, rewards)
    with suppress(OSError):  # a home that cannot be written must not stop a run; --trust remains
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def check_started(folder: Path, rewards: Sequence[str]) -> None:
    """Raise UserError if the folder's run names code and was not started by this user in this place."""
    code = _named_code(rewards)
    if code and not _mark(folder, rewards).exists():
        raise UserError(
            f"{folder}: its run.json names code to import, {', '.join(code)}, and you did not start this run"
            " here; read that code, then add --trust, or name your own with --reward"
        )


def _named_code(rewards: Sequence[str]) -> list[str]:
    """Return the rewards that are module:function or file.py:function; the others are built in."""
    return [name for name in rewards if ":" in name]


def _mark(folder: Path, rewards: Sequence[str]) -> Path:
    key = json.dumps([str(folder.resolve()), *rewards])
    return cache_folder() / "started" / hashlib.sha256(key.encode()).hexdigest()
