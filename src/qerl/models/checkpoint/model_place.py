"""Tell a path from a hub id and the built-in model, before anything heavy is imported."""

import re
from pathlib import Path

from qerl.errors import UserError, did_you_mean_folder, require
from qerl.models.checkpoint.model_folder import check_folder
from qerl.tracking.run_folders import runs_in

BUILT_IN = "smollm2-135m-instruct"


def check_place(path: str) -> None:
    """Raise UserError for what can be no model: a missing folder, also one beside folders of runs, whose name
    could be a hub id; a file that is no .gguf file; a folder without weights. Nothing is downloaded."""
    local = Path(path).expanduser()
    if path == BUILT_IN:
        return
    if path and local.is_dir():
        check_folder(local)
    elif local.is_file():
        require(local.suffix == ".gguf", f"{path}: must be a folder or a .gguf file")
    elif not is_hub_id(path):
        raise UserError(
            f"{path}: no such folder or file, not a hub id (owner/name), and not the built-in {BUILT_IN}"
            + did_you_mean_folder(local)
        )
    elif runs_in(local.parent):
        raise UserError(f"{path}: no such folder among these runs{did_you_mean_folder(local)}")


def is_hub_id(path: str) -> bool:
    """True if the text has the form of a hub id: owner/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None and not path.endswith(".gguf")
