"""What a run was made from: its whole config, the command, the source's commit, versions, the device."""

import dataclasses
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from qerl.config import RunConfig
from qerl.errors import UserError, redact

# None of these moves a number of the run: where it lies and is shown, how often it is saved, how many
# processes grade it and sample for it, and when it gives up.
EXEMPT = frozenset(
    {
        *("out", "loggers", "checkpoint.every", "checkpoint.keep", "task.reward_workers"),
        *("task.reward_memory_gb", "max_mismatch", "learn.max_nonfinite_updates"),
        *("ray.address", "ray.num_samplers"),
    }
)
_MOST_NAMED = 3
_PACKAGES = ("qerl", "torch", "transformers", "triton")


def run_facts(config: RunConfig) -> dict[str, Any]:
    return {
        "config": dataclasses.asdict(config),
        "command": redact(shlex.join(sys.argv)),
        "start_time": datetime.now().astimezone().isoformat(timespec="seconds"),
        **environment(config.model.device),
    }


def environment(device: str) -> dict[str, Any]:
    commit, is_dirty = source_state(Path(__file__).parents[3])
    return {
        "commit": commit,
        "is_dirty": is_dirty,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "device": _device_name(device),
    }


def source_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit and whether files differ from it, where root is a git checkout's own root; else None, None.

    An installed package may lie inside somebody's repository: that one's commit says nothing about it.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None, None
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    return (None, None) if commit is None or status is None else (commit, bool(status))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"learn": {"schedule": "cosine"}} -> {"learn.lr_scheduler_type": "cosine"}."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The differing entries of two trees by dotted name, as JSON; an entry that only one has is `absent`."""
    # Through JSON, where a tuple is a list: one of the two was read from a file.
    a, b = ({k: json.dumps(v) for k, v in flatten(tree).items()} for tree in (old, new))
    names = [*b, *(name for name in a if name not in b)]
    return {
        name: (a.get(name, "absent"), b.get(name, "absent")) for name in names if a.get(name) != b.get(name)
    }


def check_same_run(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """UserError naming the first fields by which the recorded config and the new one give other numbers."""
    wrong = {name: pair for name, pair in changes(old, new).items() if name not in EXEMPT}
    if not wrong:
        return
    named = [f"{name} = {was}, not {now}" for name, (was, now) in list(wrong.items())[:_MOST_NAMED]]
    more = f" and {len(wrong) - len(named)} more" if len(wrong) > len(named) else ""
    raise UserError(f"{path}: the run there has {', '.join(named)}{more}; choose another folder (out)")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
