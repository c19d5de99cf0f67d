"""Tell a path from a hub id and the built-in model, before anything heavy is imported."""

import re
from pathlib import Path

from qerl.config.regular_file import parse_json, read_regular
from qerl.errors import UserError, did_you_mean_folder, require
from qerl.models.checkpoint.model_folder import check_folder
from qerl.tracking.run_folders import runs_in

BUILT_IN = "smollm2-135m-instruct"


def check_place(path: str) -> None:
    """Raise UserError for what can be no model: a missing folder, also one beside folders of runs, whose name
    could be a hub id, unless a run trains a model of that owner; a file that is no .gguf file; a folder
    without weights. Nothing is downloaded."""
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
    elif (runs := runs_in(local.parent)) and not any(_is_of_owner(run, path) for run in runs):
        raise UserError(f"{path}: no such folder among these runs{did_you_mean_folder(local)}")


def _is_of_owner(run: Path, hub_id: str) -> bool:
    """True if the run trains a model of this hub id's owner, whose name the folder of runs has too."""
    try:
        model = parse_json(read_regular(run / "run.json"))["config"]["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return isinstance(model, str) and model.startswith(hub_id.partition("/")[0] + "/")


def is_hub_id(path: str) -> bool:
    """True if the text has the form of a hub id: owner/name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path) is not None and not path.endswith(".gguf")
