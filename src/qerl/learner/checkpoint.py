"""Save and find checkpoints; a damaged one is always recognized.

    <folder>/step-000010/                    the state after 10 steps
        adapter_model.safetensors            fp32 masters under PEFT's names: the folder is a PEFT adapter
                                             (adapter.kind full: weights under Hugging Face's names)
        adapter_config.json                  PEFT's description
        optimizer.safetensors                AdamW's moments, <adapter tensor>.<moment>
        state.json                           next_step, version, micro_tokens, and the loop's own state
        manifest.json                        SHA-256 of each other file, written last

`snapshot` copies the state at one moment, `write` writes the copy, in any thread. It is written under a
temporary name, flushed to disk, and renamed: if the process is killed at any
moment, the folder holds the old checkpoints and perhaps the new one. A checkpoint that is replaced by one of
the same step keeps a readable name until the new one is in place.
"""

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from qerl.config import AdapterConfig, ModelConfig
from qerl.errors import RunError, UserError, require
from qerl.learner.host_copy import HostCopy
from qerl.learner.learner import Learner
from qerl.models.checkpoint.safetensors_parts import safetensors_parts
from qerl.models.checkpoint.source import base_name
from qerl.models.peft.adapter import adapted_linears, targets_of
from qerl.models.peft.peft_experts import expert_parameters
from qerl.models.peft.peft_modules import modules_to_save
from qerl.models.peft.peft_names import peft_linears, peft_targets, peft_tensors
from qerl.models.peft.peft_reader import ADAPTER, ADAPTER_CONFIG
from qerl.models.policy_model import PolicyModel
from qerl.tracking.atomic_file import make_folder, sync_path, write_synced

OPTIMIZER, STATE, MANIFEST = "optimizer.safetensors", "state.json", "manifest.json"
_CONTENTS = (ADAPTER, ADAPTER_CONFIG, OPTIMIZER, STATE)
_NAME = re.compile(r"step-(\d{6,})(-replaced)?")
_UNFINISHED = ".unfinished-"


class CheckpointError(RunError):
    """A checkpoint could not be written, or no checkpoint can be read."""


class Resumed(NamedTuple):
    """Resumed(next_step=5, extra={}, notices=["checkpoints/step-000010 is damaged (...); using ..."])."""

    next_step: int
    """Number of completed steps."""
    extra: dict[str, Any]
    notices: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state before `next_step`, in host memory."""

    next_step: int
    contents: Mapping[str, list[bytes] | list[bytes | memoryview]]
    """The parts of each file; they may point into a HostCopy's memory."""


def snapshot(
    learner: Learner, *, next_step: int, extra: dict[str, Any] | None = None, memory: HostCopy | None = None
) -> Snapshot:
    """Copy the state before `next_step`; the learner may go on. `extra` is JSON. memory: takes the tensors;
    None: new memory."""
    model, memory = learner.decoder, memory or HostCopy()
    adapter = peft_tensors(model.architecture, learner.adapter_state())
    state = {
        "next_step": next_step,
        "version": learner.version,
        "micro_tokens": learner.micro_tokens,
        "extra": extra or {},
    }
    tensors = {ADAPTER: adapter, OPTIMIZER: learner.optimizer_state()}
    copies = memory.take(
        {f"{file} {name}": t for file, named in tensors.items() for name, t in named.items()}
    )
    packed = {
        file: safetensors_parts({name: copies[f"{file} {name}"] for name in named})
        for file, named in tensors.items()
    }
    described = {
        ADAPTER_CONFIG: [_json(adapter_description(learner.config.adapter, learner.config.model, model))],
        STATE: [_json(state)],
    }
    contents = packed | described
    return Snapshot(next_step=next_step, contents={name: contents[name] for name in _CONTENTS})


def write(folder: Path, state: Snapshot, *, keep: int) -> Path:
    """Write a checkpoint and keep only the newest `keep`; raise CheckpointError if the disk refuses it."""
    name = f"step-{state.next_step:06d}"
    unfinished, path = folder / (_UNFINISHED + name), folder / name
    try:
        _remove_unfinished(folder)
        make_folder(folder)
        unfinished.mkdir()
        _write_all(unfinished, state.contents)
        _put_in_place(unfinished, path)
        _prune(folder, state.next_step, keep)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason}") from error
    return path


def copy(path: Path, folder: Path) -> None:
    """Copy a checkpoint of another run into a folder of checkpoints."""
    require(_NAME.fullmatch(path.name) is not None, f"{path}: a checkpoint's name is step- and its step")
    unfinished = folder / (_UNFINISHED + path.name)
    _remove_unfinished(folder)
    make_folder(folder)
    shutil.copytree(path, unfinished)
    for file in [*unfinished.iterdir(), unfinished]:
        sync_path(file)
    _put_in_place(unfinished, folder / path.name)


def load_latest(folder: Path, learner: Learner) -> Resumed | None:
    """Load the newest intact checkpoint into the learner; return None if there is no checkpoint."""
    _remove_unfinished(folder)
    path, notices = find_latest(folder)
    if path is None:
        return None
    state = json.loads((path / STATE).read_bytes())
    adapter, optimizer = _unpacked(path / ADAPTER), _unpacked(path / OPTIMIZER)
    learner.load(adapter, optimizer, state["version"], state["micro_tokens"])
    return Resumed(state["next_step"], state["extra"], notices)


def latest_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the masters of the newest intact checkpoint by PEFT's names; the folder is only read."""
    return latest_described_adapter(folder)[0]


def latest_described_adapter(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the same and the description of the tensors."""
    path, _ = find_latest(folder)
    if path is None:
        raise UserError(f"{folder} holds no checkpoint")
    try:
        return _unpacked(path / ADAPTER), json.loads((path / ADAPTER_CONFIG).read_bytes())
    except FileNotFoundError:
        if path in _newest_first(folder):
            raise
    return latest_described_adapter(folder)  # the run has written a newer one


def find_latest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint (None if the folder has none) and a notice for each damaged one.

    Raise CheckpointError if all are damaged: only the user may decide to start over."""
    paths, notices = _newest_first(folder), []
    for path in paths:
        damage = find_damage(path)
        if damage is None:
            return path, [f"{notice}; using {path.name}" for notice in notices]
        if path not in _newest_first(folder):  # removed by the run, which has a newer one
            return find_latest(folder)
        notices.append(f"{folder.name}/{path.name} is damaged ({damage})")
    if notices:
        raise CheckpointError(
            f"{'; '.join(notices)}; no checkpoint is intact: put back a copy of {folder}, or remove it and"
            " train from the beginning with --accept-changes"
        )
    return None, []


def adapter_folder(source: str) -> Path | None:
    """Return the PEFT adapter that the source is, or the newest intact checkpoint of the run that it is; None
    if it is a model."""
    folder = Path(source).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        return folder
    return find_latest(folder / "checkpoints")[0] if (folder / "run.json").is_file() else None


def saved_steps(folder: Path) -> list[int]:
    """Return the numbers of steps of the checkpoints in the folder, newest first, damaged ones included."""
    return [_order(path)[0] for path in _newest_first(folder)]


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, `optimizer.safetensors: checksum differs`, or None."""
    name = MANIFEST
    try:
        sums = json.loads((path / MANIFEST).read_bytes())["sha256"]
        if missing := [each for each in _CONTENTS if each not in sums]:
            return f"{MANIFEST}: does not name {missing[0]}"
        for name in _CONTENTS:
            if hashlib.sha256((path / name).read_bytes()).hexdigest() != sums[name]:
                return f"{name}: checksum differs"
    except FileNotFoundError:
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: {os.strerror(error.errno or errno.EIO)}"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST}: unreadable"
    return None


def adapter_description(adapter: AdapterConfig, base: ModelConfig, model: PolicyModel) -> dict[str, Any]:
    """Return the description of the tensors in the folder: PEFT's adapter_config.json, with which PEFT loads
    the folder as it is, but for adapter.kind full."""
    if adapter.kind == "full":
        targets = targets_of(model, adapter)
        return {"kind": "full", "base_model_name_or_path": base_name(base.path), "targets": targets}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name(base.path),
        **_linear_targets(adapter, model),
        **_expert_targets(adapter, model),
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": modules_to_save(model.architecture, adapter),
        "use_dora": False,
        "use_rslora": adapter.use_rslora,
    }


def _linear_targets(adapter: AdapterConfig, model: PolicyModel) -> dict[str, Any]:
    if adapter.selects_names:
        return peft_linears(model.architecture, adapter, adapted_linears(model, adapter))
    return peft_targets(model.architecture, targets_of(model, adapter), adapter)


def _expert_targets(adapter: AdapterConfig, model: PolicyModel) -> dict[str, Any]:
    if adapter.experts == "none":
        return {}
    parameters, linears = expert_parameters(model.architecture), _linear_targets(adapter, model)
    ranks = dict.fromkeys(parameters, adapter.expert_rank)
    return {"target_parameters": parameters, "rank_pattern": linears.get("rank_pattern", {}) | ranks}


def _unpacked(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load(path.read_bytes())


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_all(folder: Path, contents: Mapping[str, list[bytes] | list[bytes | memoryview]]) -> None:
    sums: dict[str, str] = {}
    for name, parts in contents.items():
        write_synced(folder / name, *parts)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        sums[name] = digest.hexdigest()
    write_synced(folder / MANIFEST, _json({"sha256": sums}))
    sync_path(folder)


def _put_in_place(unfinished: Path, path: Path) -> None:
    replaced = path.with_name(f"{path.name}-replaced")
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    unfinished.rename(path)
    sync_path(path.parent)
    if replaced.exists():
        _remove(replaced)


def _prune(folder: Path, next_step: int, keep: int) -> None:
    """Remove old checkpoints, and those of later steps: the run has gone back to before them."""
    wanted = [path for path in _newest_first(folder) if _order(path) <= (next_step, True)][:keep]
    for path in _newest_first(folder):
        if path not in wanted:
            _remove(path)
    sync_path(folder)


def _remove(path: Path) -> None:
    """Rename before removing, so that a partly removed checkpoint is not taken for a damaged one."""
    hidden = path.with_name(_UNFINISHED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _order(path: Path) -> tuple[int, bool]:
    """Sort by step; of two with the same step, the replacing one is newer."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), match[2] is None


def _newest_first(folder: Path) -> list[Path]:
    paths = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(paths, key=_order, reverse=True)
