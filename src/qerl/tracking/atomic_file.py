"""Files that are replaced atomically, folders whose names are flushed, and the lock of a folder.

A folder that is open is still known after it was moved: its descriptor names it, its path may not.
"""

import fcntl
import json
import math
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from qerl.config.regular_file import parse_json, read_regular
from qerl.errors import RunError, UserError

RELEASE_S = 10.0
"""So long is waited: a process that a killed run had just forked has its lock until its Python begins."""


def finite(value: Any) -> Any:
    """Return a copy that strict JSON can hold: non-finite numbers become None, tuples lists, keys strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def encode(value: Any, *, indent: int | None = None) -> bytes:
    """Return UTF-8 JSON; half a surrogate pair, which UTF-8 cannot hold, becomes its \\u escape."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="backslashreplace")


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file; after a crash it has the old content or the new, never a part of it. What killed
    processes left of it is removed."""
    # another process may be writing the same file
    part = path.with_name(f"{short_name(path)}.{os.getpid()}.part")
    _remove_parts(path, except_of=part)
    try:
        write_synced(part, content)
        os.replace(part, path)
        sync_path(path.parent)
    except OSError as error:
        with suppress(OSError):  # a disk that is read-only keeps it
            part.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def short_name(path: Path) -> str:
    """Return the beginning of the name, which leaves room for an ending: a name may have 255 bytes."""
    return os.fsencode(path.name)[:200].decode(errors="ignore")


def _remove_parts(path: Path, *, except_of: Path) -> None:
    """Remove the parts whose processes have ended, here and on other machines that share the disk."""
    named = re.compile(rf"{re.escape(short_name(path))}\.(\d+)\.part")
    with suppress(OSError):
        for name in os.listdir(path.parent):
            part, match = path.with_name(name), named.fullmatch(name)
            if match and part != except_of and not _is_running(int(match[1])):
                with suppress(OSError), open(part, "ab") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    part.unlink()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    with suppress(OSError):  # one that has ended, but whose parent has not asked for its exit code
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def write_synced(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file of these parts and flush its content to the disk; it is locked meanwhile."""
    with open(path, "wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its missing parents, flush their names to the disk, return them, the folder first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(PermissionError):  # a folder may be writable and not readable
            sync_path(path.parent)
    return missing


def read_object(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; raise UserError if the file is damaged."""
    try:
        value = parse_json(read_regular(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; restore it or remove it") from None
    except ValueError as error:
        raise UserError(f"{path}: is damaged ({error}); restore it or remove it") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: is damaged (not a JSON object); restore it or remove it")
    return value


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object; None if the text is damaged."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


class OpenFolder:
    """A folder that other programs may move while it is open."""

    def __init__(self, path: Path):
        self._path, self._descriptor = path, os.open(path, os.O_RDONLY)

    def place(self) -> Path | None:
        """Return the folder's path at present; None if it was removed."""
        return next(filter(self._is_here, (self._path, self._named())), None)

    def close(self) -> None:
        os.close(self._descriptor)

    def _named(self) -> Path:
        """Return the path that the kernel knows; the first one where it tells none."""
        get_path = getattr(fcntl, "F_GETPATH", None)
        if get_path is not None:  # macOS
            name: bytes = fcntl.fcntl(self._descriptor, get_path, bytes(1024))
            return Path(os.fsdecode(name.rstrip(b"\0")))
        link = Path(f"/proc/self/fd/{self._descriptor}")
        return link.readlink() if link.is_symlink() else self._path

    def _is_here(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
            return False


class Lock:
    """Lock a folder for one process; the kernel releases the lock when the process ends, however it ends."""

    def __init__(self, folder: Path):
        self._file = open(folder / ".lock", "a+")  # noqa: SIM115
        # A forked worker may outlive a killed run for a moment and must not keep the lock.
        os.register_at_fork(after_in_child=self._file.close)
        end_s = time.monotonic() + RELEASE_S
        while not self._take():
            self._file.seek(0)
            owner = self._file.read().strip()
            if (owner.isdigit() and _is_running(int(owner))) or time.monotonic() > end_s:
                self._file.close()
                raise UserError(f"{folder}: another run is writing here (process {owner})")
            time.sleep(0.01)
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:  # as in a fork
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a fork that has not closed it yet has the same lock
            self._file.close()

    def _take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
