"""Write the folder of a model or an adapter; the folder appears only when it is complete."""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qerl.errors import RunError, UserError
from qerl.models.checkpoint.model_folder import INDEX_NAME, read_json
from qerl.models.checkpoint.source import ModelSource
from qerl.models.checkpoint.tokenizer import load_tokenizer, stop_token_ids
from qerl.tracking.atomic_file import short_name, sync_path

_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD and a flag of Linux' renameat2
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
_TOKENIZER_FILES += ("chat_template*", "generation_config.json", "LICENSE*", "NOTICE*")


def check_output_folder(out: Path) -> None:
    """Raise UserError unless `out` does not exist or is an empty folder."""
    try:
        is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}") from error
    if not is_free:
        raise UserError(f"{out}: exists already and is not an empty folder")


@contextlib.contextmanager
def atomic_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `out`. At the end it is flushed to the disk and renamed to `out`; after
    an error it is removed. What killed processes left of the same folder is removed at the beginning.

    overwrite: a folder `out` stays as it is until the new one takes its place."""
    place = out.resolve()  # a link to an empty folder stays one
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        folder, descriptor = locked_folder(place.parent, f".{short_name(place)}.unfinished-")
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}") from error
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp lets only the owner read
        for path in [*folder.rglob("*"), folder]:
            sync_path(path)
        if overwrite and place.exists():
            _exchange(folder, place)
        else:
            folder.replace(place)
        sync_path(place.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{out}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _exchange(folder: Path, place: Path) -> None:
    """Swap two folders, in one operation where the system has it."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(folder), os.fsencode(place)
    if rename is not None and rename(_HERE, paths[0], _HERE, paths[1], _RENAME_EXCHANGE) == 0:
        return
    former = folder.with_name(f"{folder.name}-former")
    place.replace(former)
    folder.replace(place)
    former.replace(folder)


def locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a temporary folder with this prefix; return it and a descriptor that locks it, which the kernel
    releases with the process. Folders with the prefix whose lock is free are removed."""
    with _locked(parent):  # nobody removes the new folder before it is locked
        _remove_all_unlocked(parent, prefix)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        descriptor = os.open(folder, os.O_RDONLY)
        _lock(descriptor, fcntl.LOCK_EX)
        return folder, descriptor


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders with this prefix that killed processes left, but none that is being made."""
    with _locked(parent):
        _remove_all_unlocked(parent, prefix)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, where the file system has any."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_all_unlocked(parent: Path, prefix: str) -> None:
    """Remove those whose lock is free. The parent is locked."""
    for entry in os.scandir(parent):
        if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
            _remove_unlocked(Path(entry.path))


def _remove_unlocked(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Lock an open folder; return False where another process has the lock, or the file system has none."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = 5_000_000_000
) -> None:
    """Write model.safetensors, or shards of at most shard_bytes and their index."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total_bytes = pending_bytes = 0
    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(folder, len(shards), pending))
            pending, pending_bytes = {}, 0
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    shards.append(_write_shard(folder, len(shards), pending))
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def _write_shard(folder: Path, index: int, tensors: dict[str, Tensor]) -> list[str]:
    file = folder / f"shard-{index}"  # its name while the number of shards is unknown
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors lets only the owner read
    return list(tensors)


def write_tokenizer(folder: Path, source: ModelSource) -> None:
    """Copy the tokenizer's files, or write those of the tokenizer built from a GGUF."""
    if not source.is_gguf:
        for pattern in _TOKENIZER_FILES:
            for file in source.path.glob(pattern):
                shutil.copyfile(file, folder / file.name)
        return
    tokenizer = load_tokenizer(str(source.path))
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that 4 and vLLM do not know; both know this one.
    config = read_json(folder / "tokenizer_config.json") | {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": sorted(stop_token_ids(tokenizer, source))})


def write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
