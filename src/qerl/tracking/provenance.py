"""Provenance of a run: its whole config, the command, the commit of the source, versions and the device."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from qerl.config import RunConfig
from qerl.errors import UserError, redact

# Fields that may change when a run is resumed. None of them changes a number of the run: its folder and
# loggers, how often it is saved, the number of processes, when it aborts and what it accepts.
EXEMPT = {"out", "run_name", "loggers", "max_mismatch", "learn.max_nonfinite_updates", "accept_changes"}
EXEMPT |= {"checkpoint.every", "checkpoint.keep", "task.reward_workers", "task.reward_memory_gb"}
EXEMPT |= {"task.reward_overlap", "rank_timeout_s", "samples.keep_steps", "samples.keep_mb"}
EXEMPT |= {"ray.address", "ray.num_samplers", "strict"}
ROUNDING = {"learn.gradient_checkpointing", "learn.logprob_chunk_tokens", "learn.max_tokens_per_microbatch"}
"""Fields of the memory of learning: they change how logprobs and gradients are rounded, and are recorded."""
_MAX_NAMED_FIELDS = 3
_PACKAGES = ("qerl", "torch", "transformers", "triton")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GitState:
    commit: str
    changed_files: list[str]
    """Files that differ from the commit, untracked ones included."""


def git_state(root: Path, *, exclude: Path | None = None) -> GitState | None:
    """Return the state of the git checkout whose top folder is `root`; None where there is no such checkout
    or no commit yet. Changes below `exclude`, a path relative to `root`, are not listed.

    An installed package may lie inside an unrelated repository, whose commit says nothing about the package.
    """
    output = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if output is None:
        return None
    top, _, commit = output.rpartition("\n")
    if Path(top).resolve() != root.resolve():
        return None
    excluded = [] if exclude is None else [f":(exclude){exclude.as_posix()}"]
    status = _git(root, "status", "--porcelain", "--", ".", *excluded)
    if status is None:
        return None
    return GitState(commit=commit, changed_files=[line.split(maxsplit=1)[1] for line in status.splitlines()])


def run_facts(config: RunConfig) -> dict[str, Any]:
    """Return the content of run.json."""
    return {
        "config": dataclasses.asdict(config),
        "command": redact(shlex.join(sys.argv)),
        "start_time": datetime.now().astimezone().isoformat(timespec="seconds"),
        **environment(config.model.device),
    }


def environment(device: str) -> dict[str, Any]:
    """Return the commit of the source, the versions of the libraries, and the device's name."""
    state = git_state(Path(__file__).parents[3])
    return {
        "commit": state and state.commit,
        "is_dirty": state and bool(state.changed_files),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "device": _device_name(device),
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"learn": {"optim": "adamw"}} -> {"learn.optim": "adamw"}."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return {dotted name: (old, new)} as JSON for each entry that differs; a missing entry is `absent`."""
    # Compared as JSON, where a tuple is a list: one of the two was read from a file.
    a, b = flatten(old), flatten(new)
    names = [*b, *(name for name in a if name not in b)]
    pairs = {name: (_text(a, name), _text(b, name)) for name in names if not _is_same(a, b, name)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _text(flat: dict[str, Any], name: str) -> str:
    return json.dumps(flat[name]) if name in flat else "absent"


def _is_same(a: dict[str, Any], b: dict[str, Any], name: str) -> bool:
    """True if both have the same text, int, bool or None: most fields, of which no JSON is made."""
    if name not in a or name not in b or type(a[name]) is not type(b[name]):
        return False
    return isinstance(a[name], str | int | None) and a[name] == b[name]


def check_same_run(path: Path, old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Raise UserError if the recorded config and the new one differ in a field that is not in EXEMPT.

    Return {field: (old, new)} of what a run may go on with: more steps, ROUNDING, and rows that the user
    accepts."""
    # Before a checkpoint no cache is kept, so that a continued run is the same.
    fixed = {"checkpoint.every"} if new["rollout"]["keep_kv_cache"] else set()
    differing = {name: pair for name, pair in changes(old, new).items() if name not in EXEMPT - fixed}
    accepted = {name for name in ROUNDING if "absent" not in differing.get(name, ())}
    accepted |= {"task.name"} if new["accept_changes"] else set()
    if new["num_steps"] > old.get("num_steps", math.inf):
        accepted.add("num_steps")
    wrong = {name: pair for name, pair in differing.items() if name not in accepted}
    if not wrong:
        return {f"config.{name}": tuple(map(json.loads, pair)) for name, pair in differing.items()}
    named = [f"{name} = {was}, not {now}" for name, (was, now) in list(wrong.items())[:_MAX_NAMED_FIELDS]]
    more = f" and {len(wrong) - len(named)} more" if len(wrong) > len(named) else ""
    differs = f"{', '.join(named)}{more}"
    raise UserError(f"{path}: the existing run has {differs}; choose another folder with --out")


def check_sources(
    path: Path, old: dict[str, str], new: dict[str, str], *, accept_changes: bool
) -> dict[str, tuple[str | None, str | None]]:
    """Return {"sources.NAME": (old, new)} of the hashes that differ; raise UserError unless accepted."""
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    if names and not accept_changes:
        differing = [
            f"{'other' if name.startswith('rows ') else 'another'} {name}"
            f" ({shown(old.get(name))}, now {shown(new.get(name))})"
            for name in names
        ]
        raise UserError(
            f"{path}: the run began with {', and '.join(differing)}; --accept-changes resumes with the"
            " present state, --out begins another run"
        )
    return {f"sources.{name}": (old.get(name), new.get(name)) for name in names}


def shown(value: Any) -> str:
    """Return a value as text, a hash by its first eight digits."""
    text = "absent" if value is None else str(value)
    return text[:8] if re.fullmatch("[0-9a-f]{16,}", text) else text


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def version(name: str) -> str | None:
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


def files_stamp(path: Path) -> str:
    """Return a digest of the files' names, sizes and times, which differs if the weights were replaced."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
