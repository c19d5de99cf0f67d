"""Every write of a process below a folder, recorded, and the disks that a power cut may leave of it.

A write, and each change of a folder's names, is on the disk for certain only once its file or folder was
flushed with fsync. Until then a power cut keeps or drops each of them by itself, in any order; a write may be
torn: only its first bytes reach the disk, or only some of its sectors. Changes of the same name keep their
order.
"""

import builtins
import contextlib
import copy
import dataclasses
import io
import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TOP = 0
_SECTOR_BYTES = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Truncate:
    file: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sync:
    node: int


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Names of a folder that change at once: the node of each, None where it is removed."""

    folder: int
    nodes: dict[str, int | None]
    made: bytes | dict[str, int] | None = None
    """The first content of a new node."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """Something that the process holds to be done."""

    name: str
    value: Any


Operation = Write | Truncate | Sync | Names | Mark


class Recorder:
    """Replaces the functions of this process that change files below `root`, which are all of Python's."""

    def __init__(self, root: Path, log: Path):
        self._root, self._pid, self._lock = root, os.getpid(), threading.RLock()
        self._log, self._open = open(log, "ab"), builtins.open  # noqa: SIM115
        self._ids: dict[int, int] = {os.stat(root.parent).st_ino: TOP}
        self._next = itertools.count(1)
        self._real = {name: getattr(os, name) for name in ("open", "mkdir", "rename", "unlink", "rmdir")}

    def install(self) -> None:
        if self._root.exists():
            self._found(self._root)
        os.fsync, os.open, os.mkdir = self._fsync, self._os_open, self._mkdir
        os.rename = os.replace = self._rename
        os.unlink = os.remove = self._removing(self._real["unlink"])
        os.rmdir = self._removing(self._real["rmdir"])
        builtins.open = io.open = self._file

    def mark(self, name: str, value: Any) -> None:
        self._emit(Mark(name, value))

    def _found(self, path: Path) -> None:
        """Record what was there before as made and flushed."""
        self._made(path, {} if path.is_dir() else path.read_bytes())
        self._emit(Sync(self._node(path.parent)))
        for child in sorted(path.iterdir()) if path.is_dir() else ():
            self._found(child)

    def _emit(self, operation: Operation) -> None:
        with self._lock:
            if os.getpid() == self._pid:
                pickle.dump(operation, self._log)
                self._log.flush()

    def _node(self, path: Any) -> int:
        return self._ids[os.stat(path).st_ino]

    def _made(self, path: Path, content: bytes | dict[str, int]) -> None:
        node = self._ids[os.stat(path).st_ino] = next(self._next)
        self._emit(Names(self._node(path.parent), {path.name: node}, content))

    def _path(self, path: Any, dir_fd: int | None = None) -> Path | None:
        """The path if it is below the root."""
        if isinstance(path, int):
            return None
        base = Path.cwd() if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"))
        found = base / os.fsdecode(path)
        return found if found == self._root or self._root in found.parents else None

    def _fsync(self, descriptor: int) -> None:
        node = self._ids.get(os.fstat(descriptor).st_ino)
        if node is not None:
            self._emit(Sync(node))

    def _os_open(self, path: Any, flags: int, *more: Any, **named: Any) -> int:
        own = self._path(path, named.get("dir_fd"))
        with self._lock:
            is_new = own is not None and flags & os.O_CREAT and not own.exists()
            descriptor = self._real["open"](path, flags, *more, **named)
            if own is not None and is_new:
                self._made(own, b"")
        return descriptor

    def _mkdir(self, path: Any, *more: Any, **named: Any) -> None:
        with self._lock:
            self._real["mkdir"](path, *more, **named)
            if own := self._path(path, named.get("dir_fd")):
                self._made(own, {})

    def _rename(self, source: Any, target: Any) -> None:
        own, other = self._path(source), self._path(target)
        with self._lock:
            if own is not None:
                assert other is not None and own.parent == other.parent, (own, other)
                names = {own.name: None, other.name: self._node(own)}
                self._emit(Names(self._node(own.parent), names))
            self._real["rename"](source, target)

    def _removing(self, real: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            with self._lock:
                own = self._path(path, dir_fd)
                real(path, dir_fd=dir_fd)
                if own is not None:
                    self._emit(Names(self._node(own.parent), {own.name: None}))

        return remove

    def _file(self, path: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        own = self._path(path)
        if own is None or not set(mode) & set("wax+"):
            return self._open(path, mode, buffering, *more, **named)
        with self._lock:
            is_new = not own.exists()
            raw = RecordedFile(own, mode.replace("b", "").replace("t", ""))
            raw.recorder = self
            if is_new:
                self._made(own, b"")
            elif "w" in mode:
                self._emit(Truncate(self._node(own), 0))
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *more, **named)

    def changed(self, descriptor: int, make: Callable[[int], Operation]) -> None:
        self._emit(make(self._ids[os.fstat(descriptor).st_ino]))


class RecordedFile(io.FileIO):
    recorder: Recorder

    def write(self, data: Any) -> int:
        num_bytes = super().write(data)
        end, content = self.tell(), bytes(memoryview(data).cast("B")[:num_bytes])
        self.recorder.changed(self.fileno(), lambda file: Write(file, end - num_bytes, content))
        return num_bytes

    def truncate(self, size: int | None = None) -> int:
        size = super().truncate(size)
        self.recorder.changed(self.fileno(), lambda file: Truncate(file, size))
        return size


def operations(log: Path) -> list[Operation]:
    with open(log, "rb") as file:
        return list(_unpickled(file))


def _unpickled(file: io.BufferedReader) -> Iterator[Operation]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(file)


class Disk:
    """The nodes that are on the disk for certain, and the operations that a power cut may keep or drop."""

    def __init__(self) -> None:
        self._nodes: dict[int, Any] = {TOP: {}}
        self._pending: dict[int, list[Any]] = {}

    def take(self, operation: Operation) -> None:
        match operation:
            case Mark():
                return
            case Sync(node):
                for pending in self._pending.pop(node, ()):
                    self._apply(self._nodes, pending)
            case Names(folder, nodes, made):
                if made is not None:
                    (node,) = nodes.values()
                    assert node is not None
                    self._nodes[node] = copy.copy(made)
                self._pending.setdefault(folder, []).append(operation)
            case Write(file) | Truncate(file):
                self._pending.setdefault(file, []).append(operation)

    def crash(self, rng: random.Random, root: str, target: Path) -> None:
        """Write a folder that a power cut now may leave; nothing if its name is lost."""
        nodes = {node: copy.copy(content) for node, content in self._nodes.items()}
        share = rng.choice((0.0, 0.5, 1.0, rng.random()))
        for node in sorted(self._pending):
            lost: set[str] = set()
            for operation in self._pending[node]:
                if isinstance(operation, Names):
                    if rng.random() < share and not lost & set(operation.nodes):
                        self._apply(nodes, operation)
                    else:
                        lost |= set(operation.nodes)
                elif rng.random() < share:
                    for part in _torn(operation, rng):
                        self._apply(nodes, part)
        if root in nodes[TOP]:
            _write(nodes, nodes[TOP][root], target)

    @staticmethod
    def _apply(nodes: dict[int, Any], operation: Any) -> None:
        match operation:
            case Names(folder, changed):
                kept = {**nodes[folder], **changed}
                nodes[folder] = {name: node for name, node in kept.items() if node is not None}
            case Truncate(file, size):
                nodes[file] = nodes[file][:size].ljust(size, b"\0")
            case Write(file, offset, data):
                before = nodes[file].ljust(offset, b"\0")
                nodes[file] = before[:offset] + data + before[offset + len(data) :]


def _torn(operation: Write | Truncate, rng: random.Random) -> Iterable[Write | Truncate]:
    """Return the parts that reach the disk of an operation that is not dropped as a whole."""
    if isinstance(operation, Truncate) or rng.random() < 0.5:
        return [operation]
    file, offset, data = operation.file, operation.offset, operation.data
    if rng.random() < 0.5:
        return [Write(file, offset, data[: rng.randrange(len(data) + 1)])]
    starts = range(0, len(data), _SECTOR_BYTES)
    return [
        Write(file, offset + start, data[start : start + _SECTOR_BYTES])
        for start in starts
        if rng.random() < 0.5
    ]


def _write(nodes: dict[int, Any], node: int, path: Path) -> None:
    content = nodes[node]
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.mkdir()
    for name, child in content.items():
        _write(nodes, child, path / name)
