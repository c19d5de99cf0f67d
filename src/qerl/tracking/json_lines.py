"""JSON lines with a checksum each, in a file that is appended to and watched for other writers.

line      {"step": 3, ..., "crc32": "0123abcd"}: strict JSON; a number that is not finite becomes null
crc32     CRC-32 of the line's bytes before `, "crc32"`
append    all lines in one write, then fsync: a kill leaves at most an incomplete last line
cut       truncate the file at the first line of a step that is taken again
repair    before a step is written: put the file back if another program has replaced or removed it
"""

import itertools
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qerl.config.regular_file import open_regular
from qerl.errors import RunError, UserError, quantity
from qerl.tracking.atomic_file import encode, parse_object, write_atomic, write_synced

_CHECKSUM = re.compile(rb'(.*), "crc32": "([0-9a-f]{8})"\}\r?\n?', re.DOTALL)
_MAX_NAMED_LINES = 5


class RemainingLines(NamedTuple):
    """Content of a file that was cut."""

    steps: set[int]
    damaged: list[int]
    """Numbers of the damaged lines that are left; the first line is 1."""
    torn: list[int]
    """Numbers of the damaged lines after the last that is left: damage only if a step is missing, else never
    flushed, as after a power cut."""


def encode_line(record: dict[str, Any]) -> bytes:
    """Return the line of a record that is not empty."""
    content = encode(record)[:-1]
    return content + b', "crc32": "%08x"}\n' % zlib.crc32(content)


def is_intact(line: bytes) -> bool:
    """True if the line ends with its checksum."""
    match = _CHECKSUM.fullmatch(line)
    return match is not None and int(match[2], 16) == zlib.crc32(match[1])


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the line's JSON object, without its checksum; None if the line is damaged."""
    record = parse_object(line) if is_intact(line) else None
    if record is not None:
        del record["crc32"]
    return record


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of each line that is intact."""
    with open_regular(path) as file:
        yield from (record for record in map(decode, file) if record is not None)


def damage_notice(name: str, numbers: Sequence[int]) -> str:
    """Return "metrics.jsonl: skipped 2 damaged lines: 3, 7"."""
    named = ", ".join(map(str, numbers[:_MAX_NAMED_LINES])) + ", ..." * (len(numbers) > _MAX_NAMED_LINES)
    return f"{name}: skipped {quantity(len(numbers), 'damaged line')}: {named}"


class JsonLines:
    """A file of JSON lines that is appended to. Opening it removes an incomplete last line."""

    def __init__(self, path: Path):
        self._path = path
        self._open()
        self._drop_incomplete_line()
        self._observe()

    def append(self, records: list[dict[str, Any]]) -> None:
        content = b"".join(map(encode_line, records))
        try:
            while content:
                content = content[self._file.write(content) :]
            os.fsync(self._file.fileno())
            self._observe()
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written: {error.strerror}") from error

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the object of each line that is intact."""
        return read_lines(self._path)

    def cut(self, next_step: int) -> RemainingLines:
        """Remove what follows the last line of a step before next_step."""
        size = kept_bytes = 0
        later: int | None = None
        steps: set[int] = set()
        damaged: list[int] = []
        pending: list[int] = []
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                step = (decode(line) or {}).get("step")
                size += len(line)
                if not isinstance(step, int):
                    pending.append(number)
                elif step >= next_step:
                    later = later or number
                elif later is not None:
                    raise UserError(
                        f"{self._path}: line {later} is of a later step than line {number}; restore the file"
                        " or remove it"
                    )
                else:
                    damaged, pending, kept_bytes = damaged + pending, [], size
                    steps.add(step)
        if kept_bytes < size:
            self._truncate(kept_bytes)
        return RemainingLines(steps, damaged, pending)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._identity[2]

    def replace(self, content: bytes) -> None:
        """Replace all lines at once."""
        write_atomic(self._path, content)
        self._file.close()
        self._open()
        self._observe()

    def repair(self) -> str | None:
        """Repair what another program did to the file since the last write, and return what it was."""
        try:
            identity = _identity(os.stat(self._path))
            if identity == self._identity:
                return None
            return self._examine() if identity[:2] == self._identity[:2] else self._put_back(is_replaced=True)
        except FileNotFoundError:
            return self._put_back(is_replaced=False)
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        # Unbuffered: a write that fails, as on a full disk, leaves nothing for close() to write.
        self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115

    def _observe(self) -> None:
        self._identity = _identity(os.fstat(self._file.fileno()))

    def _put_back(self, *, is_replaced: bool) -> str:
        """Write the run's own content, which the open file still has, in place of the other file."""
        self._file.seek(0)
        content, aside = self._file.readall(), ""
        if is_replaced and (other := self._path.read_bytes()) != content:
            path = _unused(self._path.with_name(f"{self._path.name}.other"))
            write_synced(path, other)
            aside = f", and the other file is {path.name}"
        self.replace(content)
        done = "replaced" if is_replaced else "removed"
        name = self._path.name
        return f"another program {done} {name} while the run wrote it: it is in place again{aside}"

    def _examine(self) -> str | None:
        """Return what another program did to the file in place; None if every line is still there."""
        was_bytes, now_bytes = self._identity[2], os.fstat(self._file.fileno()).st_size
        self._file.seek(0)
        lines = self._file.readall().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self._file.write(b"\n")
        self._observe()
        damaged = [number for number, line in enumerate(lines, start=1) if decode(line) is None]
        if not damaged and now_bytes == was_bytes:
            return None
        text = f"another program changed {self._path.name} while the run wrote it: it has {now_bytes} bytes,"
        text += f" the run wrote {was_bytes}"
        return text + (f"; {damage_notice(self._path.name, damaged)}" if damaged else "")

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
        self._observe()


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _unused(path: Path) -> Path:
    """Return the path, or with a number where there is such a file."""
    paths = (path.with_name(f"{path.name}{number}") for number in itertools.count(2))
    return path if not path.exists() else next(other for other in paths if not other.exists())
