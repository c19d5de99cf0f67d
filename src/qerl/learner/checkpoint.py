"""Saves and finds checkpoints of which every one on the disk is whole, or known not to be.

    <folder>/step-000010/                    the state after 10 steps
        adapter_model.safetensors            fp32 masters under PEFT's names: this folder is a PEFT adapter
                                             (adapter.kind full: weights, under Hugging Face's names)
        adapter_config.json                  PEFT's description of it
        optimizer.safetensors                AdamW's moments, <adapter tensor>.<moment>
        state.json                           next_step, version, micro_tokens, and what the loop adds
        manifest.json                        SHA-256 of each of the others, written last

A checkpoint is written under a name that no reader takes for one, flushed to the disk, and renamed into
place: killed at any moment, the folder holds the old ones and perhaps the new one. Where a checkpoint of the
same step is replaced, the old one keeps a readable name until the new one has its place.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from qerl.config import RunConfig
from qerl.errors import RunError, UserError
from qerl.learner.learner import Learner
from qerl.models.peft_reader import ADAPTER, ADAPTER_CONFIG

OPTIMIZER, STATE, MANIFEST = "optimizer.safetensors", "state.json", "manifest.json"
_CONTENTS = (ADAPTER, ADAPTER_CONFIG, OPTIMIZER, STATE)
_NAME = re.compile(r"step-(\d{6,})(-replaced)?")
_UNFINISHED = ".unfinished-"


class CheckpointError(RunError):
    """A checkpoint could not be written, or none of those there can be read."""


class Resumed(NamedTuple):
    """Resumed(next_step=5, extra={}, notices=["checkpoints/step-000010 is damaged (...); using ..."])."""

    next_step: int
    """How many steps had been done."""
    extra: dict[str, Any]
    notices: list[str]


def save(
    folder: Path, learner: Learner, *, next_step: int, keep: int, extra: dict[str, Any] | None = None
) -> Path:
    """The state before `next_step`; then only the newest `keep` up to this one stay. `extra` is JSON."""
    name = f"step-{next_step:06d}"
    unfinished, path = folder / (_UNFINISHED + name), folder / name
    try:
        _remove_unfinished(folder)
        unfinished.mkdir(parents=True)
        _write_all(unfinished, _contents(learner, next_step, extra or {}))
        _put_in_place(unfinished, path)
        _prune(folder, next_step, keep)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason}") from error
    return path


def load_latest(folder: Path, learner: Learner) -> Resumed | None:
    """Puts the newest whole checkpoint into the learner; None where there is none at all."""
    _remove_unfinished(folder)
    path, notices = find_latest(folder)
    if path is None:
        return None
    state = json.loads((path / STATE).read_bytes())
    adapter, optimizer = _unpacked(path / ADAPTER), _unpacked(path / OPTIMIZER)
    learner.load(adapter, optimizer, state["version"], state.get("micro_tokens"))
    return Resumed(state["next_step"], state["extra"], notices)


def latest_adapter(folder: Path) -> dict[str, Tensor]:
    """The masters of the newest whole checkpoint, by PEFT's names; the folder is only read."""
    path, _ = find_latest(folder)
    if path is None:
        raise UserError(f"{folder} holds no checkpoint")
    try:
        return _unpacked(path / ADAPTER)
    except FileNotFoundError:
        if path in _newest_first(folder):
            raise
    return latest_adapter(folder)  # a run that goes on has a newer one


def find_latest(folder: Path) -> tuple[Path | None, list[str]]:
    """(the newest whole checkpoint, or None if there is none at all; a notice for each damaged one).

    Where all are damaged, a CheckpointError: going back to the start is not for us to decide.
    """
    paths, notices = _newest_first(folder), []
    for path in paths:
        damage = find_damage(path)
        if damage is None:
            return path, [f"{notice}; using {path.name}" for notice in notices]
        if path not in _newest_first(folder):  # not damaged but removed, by a run that has a newer one
            return find_latest(folder)
        notices.append(f"{folder.name}/{path.name} is damaged ({damage})")
    if notices:
        raise CheckpointError(
            f"{'; '.join(notices)}; no checkpoint is whole: remove {folder} to start from the beginning"
        )
    return None, []


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, `optimizer.safetensors: checksum differs`, or None."""
    try:
        sums = json.loads((path / MANIFEST).read_bytes())["sha256"]
        missing = [name for name in _CONTENTS if name not in sums]
    except FileNotFoundError:
        return f"{MANIFEST}: missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST}: unreadable"
    except OSError as error:
        return f"{MANIFEST}: {os.strerror(error.errno or errno.EIO)}"
    if missing:
        return f"{MANIFEST}: does not name {missing[0]}"
    for name in _CONTENTS:
        try:
            if hashlib.sha256((path / name).read_bytes()).hexdigest() != sums[name]:
                return f"{name}: checksum differs"
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: {os.strerror(error.errno or errno.EIO)}"
    return None


def peft_config(config: RunConfig) -> dict[str, Any]:
    """What PEFT wants to know of an adapter, so that the folder loads there as it is."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.path,
        "r": config.adapter.rank,
        "lora_alpha": config.adapter.alpha,
        "target_modules": list(config.adapter.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def described(config: RunConfig) -> dict[str, Any]:
    """What the tensors beside it are."""
    if config.adapter.kind == "lora":
        return peft_config(config)
    return {
        "kind": "full",
        "base_model_name_or_path": config.model.path,
        "targets": config.adapter.target_modules,
    }


def _contents(learner: Learner, next_step: int, extra: dict[str, Any]) -> dict[str, bytes]:
    state = {
        "next_step": next_step,
        "version": learner.version,
        "micro_tokens": learner.micro_tokens,
        "extra": extra,
    }
    return {
        ADAPTER: _packed(learner.adapter_state()),
        ADAPTER_CONFIG: _json(described(learner.config)),
        OPTIMIZER: _packed(learner.optimizer_state()),
        STATE: _json(state),
    }


def _packed(tensors: dict[str, Tensor]) -> bytes:
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(contiguous, metadata={"format": "pt"})


def _unpacked(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load(path.read_bytes())


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_all(folder: Path, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        _write(folder / name, data)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    _write(folder / MANIFEST, _json({"sha256": sums}))
    _sync_folder(folder)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the names in it last, as fsync of a file does not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(unfinished: Path, path: Path) -> None:
    replaced = path.with_name(f"{path.name}-replaced")
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    unfinished.rename(path)
    _sync_folder(path.parent)
    if replaced.exists():
        _remove(replaced)


def _prune(folder: Path, next_step: int, keep: int) -> None:
    """Later steps go too: a run that now saves this one went back to before them."""
    wanted = [path for path in _newest_first(folder) if _order(path) <= (next_step, True)][:keep]
    for path in _newest_first(folder):
        if path not in wanted:
            _remove(path)
    _sync_folder(folder)


def _remove(path: Path) -> None:
    """Out of sight first, so that nothing half removed is taken for a damaged checkpoint."""
    hidden = path.with_name(_UNFINISHED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _order(path: Path) -> tuple[int, bool]:
    """By step; of two of the same step, the one that replaced the other is the newer."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), match[2] is None


def _newest_first(folder: Path) -> list[Path]:
    found = [p for p in folder.iterdir() if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return sorted(found, key=_order, reverse=True)
