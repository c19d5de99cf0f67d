"""Crash-safe files: JSON lines that are appended to, files that are replaced atomically, and a folder lock.

line      one JSON object and a newline; strict JSON: a number that is not finite becomes null
append    all lines in one write, then fsync: a kill leaves at most an incomplete last line
cut       truncate the file at the first line of a step that is taken again
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from qerl.errors import RunError, UserError
from qerl.regular_file import parse_json, read_regular


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


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the line's JSON object; None if the line is damaged."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file; after a crash it has the old content or the new, never a part of it."""
    part = path.with_name(path.name + ".part")
    try:
        write_synced(part, content)
        os.replace(part, path)
        sync_path(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush its content to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and flush the names of those that were made to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(PermissionError):  # a folder may be writable and not readable
            sync_path(path.parent)


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


class JsonLines:
    """A file of JSON lines that is appended to. Opening it removes an incomplete last line."""

    def __init__(self, path: Path):
        self._path = path
        # Unbuffered: a signal handler may append during an append, which a buffered file does not allow.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._drop_incomplete_line()

    def append(self, records: list[dict[str, Any]]) -> None:
        content = b"".join(encode(record) + b"\n" for record in records)
        try:
            while content:
                content = content[self._file.write(content) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(f"{self._path}: {error.strerror}") from error

    def read(self) -> Iterator[dict[str, Any] | None]:
        """Yield each line's object; None for a damaged line."""
        with open(self._path, "rb") as file:
            yield from map(decode, file)

    def cut(self, next_step: int) -> set[int]:
        """Remove the lines of steps from next_step on, and damaged lines among them; return the steps that
        are left."""
        size, cut_at, steps = 0, None, set()
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                step = (decode(line) or {}).get("step")
                is_kept = isinstance(step, int) and step < next_step
                if is_kept and cut_at is not None:
                    raise UserError(f"{self._path}: a line before line {number} is damaged or out of order")
                if not is_kept and cut_at is None:
                    cut_at = size
                steps |= {step} if is_kept else set()
                size += len(line)
        if cut_at is not None:
            self._truncate(cut_at)
        return steps

    def close(self) -> None:
        self._file.close()

    def _drop_incomplete_line(self) -> None:
        whole_bytes, is_incomplete = 0, False
        with open(self._path, "rb") as file:
            for line in file:
                is_incomplete = not line.endswith(b"\n")
                whole_bytes += 0 if is_incomplete else len(line)
        if is_incomplete:
            self._truncate(whole_bytes)

    def _truncate(self, size: int) -> None:
        self._file.truncate(size)
        os.fsync(self._file.fileno())


class Lock:
    """Lock a folder for one process; the kernel releases the lock when the process ends, however it ends."""

    def __init__(self, folder: Path):
        self._file = open(folder / ".lock", "a+")  # noqa: SIM115
        # A forked worker may outlive a killed run for a moment and must not keep the lock.
        os.register_at_fork(after_in_child=self._file.close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            raise UserError(f"{folder}: another run is writing here (process {owner})") from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
