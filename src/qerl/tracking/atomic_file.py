"""Files that stay whole when the process dies at any byte.

Two kinds: JSON lines that only grow, and files that are replaced in one piece.

    a line    one JSON object and a newline, strict JSON: a number that is not finite becomes null
    append    all lines of one moment in one write, then fsync: a kill leaves at most a torn end
    cut       everything from the first line that no longer belongs, by one truncation: nothing is copied
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl.errors import RunError, UserError

_MEND = "restore it or remove it"


def finite(value: Any) -> Any:
    """The value as strict JSON knows it, all the way down."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def encode(value: Any, *, indent: int | None = None) -> bytes:
    """UTF-8 JSON; half a surrogate pair, which UTF-8 cannot hold, stays readable as its \\u escape."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="backslashreplace")


def decode(line: bytes) -> dict[str, Any] | None:
    """The line's object; None where the line is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_atomic(path: Path, content: bytes) -> None:
    """After a crash the file is the old one or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written ({error.strerror})") from error


def read_object(path: Path) -> dict[str, Any]:
    """What `write_atomic` put there; UserError where it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({error}); {_MEND}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: is damaged (not a JSON object); {_MEND}")
    return value


class JsonLines:
    """One growing file of JSON lines. Opening it drops a torn last line, so that the next starts fresh."""

    def __init__(self, path: Path):
        self._path = path
        # Unbuffered: a signal handler may append while an append is under way, which a buffered file refuses.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._drop_torn_end()

    def append(self, records: list[dict[str, Any]]) -> None:
        content = b"".join(encode(record) + b"\n" for record in records)
        try:
            while content:
                content = content[self._file.write(content) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError(f"{self._path}: {error.strerror}") from error

    def read(self) -> Iterator[dict[str, Any] | None]:
        """Each line's object in turn; None for a damaged line."""
        with open(self._path, "rb") as file:
            yield from map(decode, file)

    def cut(self, next_step: int) -> set[int]:
        """Drop the lines of steps from next_step on, and damaged lines among them; the steps of which lines
        stay."""
        size, cut_at, steps = 0, None, set()
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                step = (decode(line) or {}).get("step")
                stays = isinstance(step, int) and step < next_step
                if stays and cut_at is not None:
                    raise UserError(f"{self._path}: a line before line {number} is damaged or out of order")
                if not stays and cut_at is None:
                    cut_at = size
                steps |= {step} if stays else set()
                size += len(line)
        if cut_at is not None:
            self._truncate(cut_at)
        return steps

    def close(self) -> None:
        self._file.close()

    def _drop_torn_end(self) -> None:
        whole, torn = 0, False
        with open(self._path, "rb") as file:
            for line in file:
                torn = not line.endswith(b"\n")
                whole += 0 if torn else len(line)
        if torn:
            self._truncate(whole)

    def _truncate(self, size: int) -> None:
        self._file.truncate(size)
        os.fsync(self._file.fileno())


class Lock:
    """One process at a time in a folder; the kernel lifts it when the process ends, however it ends."""

    def __init__(self, folder: Path):
        self._file = open(folder / ".lock", "a+")  # noqa: SIM115
        # A forked worker outlives a run that is killed for a moment, and would hold the lock as long.
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
