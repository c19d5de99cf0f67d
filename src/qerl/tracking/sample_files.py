"""The samples of a run: the newest in samples.jsonl, older ones compressed, the oldest removed if asked.

    samples.jsonl                      the newest steps, a line per sample
    samples/000000-000119.jsonl.gz     steps 0 to 119, the same lines

Steps are in a compressed file, which is flushed, before they leave samples.jsonl. After a kill between the
two they are in both, and readers take them from the compressed one. A run that takes a step of a compressed
file again puts the steps before it back into samples.jsonl.
"""

import contextlib
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from qerl.config import SamplesConfig
from qerl.config.regular_file import open_regular
from qerl.errors import RunError
from qerl.tracking.atomic_file import make_folder, sync_path, write_atomic
from qerl.tracking.json_lines import JsonLines, RemainingLines, decode

SEGMENT_BYTES = 16 << 20
"""samples.jsonl is compressed once it is this large: within 0.6 s on a CPU."""
MAX_LINE_BYTES, _MAX_FILE_BYTES = 64 << 20, 4 << 30
_NAME = re.compile(r"([0-9]{6,15})-([0-9]{6,15})\.jsonl\.gz")
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
"""Raised by reading a compressed file that is damaged."""


class Segment(NamedTuple):
    """A compressed file, and the first and the last step in it."""

    path: Path
    first: int
    last: int


def sample_files(folder: Path) -> list[Segment]:
    """Return all files of a run's samples, oldest first; samples.jsonl, without an end, is the last one."""
    path = folder / "samples.jsonl"
    return [*segments(folder), *([Segment(path, 0, -1)] if path.exists() else [])]


def segments(folder: Path) -> list[Segment]:
    """Return the compressed files of a run's folder, oldest first."""
    place = folder / "samples"
    names = [(path, _NAME.fullmatch(path.name)) for path in (place.iterdir() if place.is_dir() else ())]
    matched = [Segment(path, int(match[1]), int(match[2])) for path, match in names if match]
    return sorted(matched, key=lambda segment: (segment.first, segment.last))


@contextlib.contextmanager
def open_samples(path: Path) -> Iterator[BinaryIO]:
    """Open a file of samples, compressed or not; positions are those of the lines' bytes."""
    with open_regular(path) as file:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


def sample_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file of samples; raise DAMAGE where a compressed one is damaged."""
    num_bytes = 0
    with open_samples(path) as file:
        while (line := file.readline(MAX_LINE_BYTES)) and num_bytes < _MAX_FILE_BYTES:
            num_bytes += len(line)
            yield line


class SampleFiles:
    """The files of samples that a journal writes."""

    def __init__(self, folder: Path):
        self._folder, self._path = folder, folder / "samples.jsonl"
        self._lines, self.config = JsonLines(self._path), SamplesConfig()
        self.repair, self.close = self._lines.repair, self._lines.close
        self._steps: set[int] = set()

    def append(self, records: list[dict[str, Any]]) -> None:
        """Append the samples of one step; before that compress samples.jsonl if it is large enough."""
        if self._is_full():
            try:
                self._compress()
                self._remove_oldest()
            except OSError as error:
                raise RunError(f"{self._folder / 'samples'}: cannot be written: {error.strerror}") from error
        self._steps.add(records[0]["step"])
        self._lines.append(records)

    def cut(self, next_step: int) -> RemainingLines:
        """Remove the samples of steps from next_step on."""
        removed = [segment for segment in segments(self._folder) if segment.last >= next_step]
        if removed and removed[0].first < next_step:
            lines = [line for line in _intact_lines(removed[0].path) if _step(line) < next_step]
            self._lines.replace(b"".join(lines))
        for segment in reversed(removed):
            segment.path.unlink()
            sync_path(segment.path.parent)
        compressed = segments(self._folder)
        if compressed and any(step <= compressed[-1].last for step in map(_step, _intact_lines(self._path))):
            self._lines.replace(b"")
        steps, damaged, torn = self._lines.cut(next_step)
        self._steps = set(steps)
        for path, first, last in compressed:
            in_file = {_step(line) for line in _intact_lines(path)}
            steps |= set(range(first, last + 1)) if {first, last} <= in_file else in_file
        has_limit = (self.config.keep_steps, self.config.keep_mb) != (None, None)
        return RemainingLines(steps | set(range(min(steps, default=0) if has_limit else 0)), damaged, torn)

    def _is_full(self) -> bool:
        keep_steps, keep_mb = self.config.keep_steps, self.config.keep_mb
        limit_bytes = SEGMENT_BYTES if keep_mb is None else min(SEGMENT_BYTES, keep_mb * 10**6 // 4)
        is_long = keep_steps is not None and len(self._steps) >= keep_steps
        return bool(self._steps) and (is_long or self._lines.num_bytes >= limit_bytes)

    def _compress(self) -> None:
        steps = list(map(_step, _intact_lines(self._path)))
        name = f"{min(steps):06d}-{max(steps):06d}.jsonl.gz"
        make_folder(self._folder / "samples")
        write_atomic(self._folder / "samples" / name, gzip.compress(self._path.read_bytes(), 6, mtime=0))
        self._lines.replace(b"")
        self._steps = set()

    def _remove_oldest(self) -> None:
        """Remove the oldest compressed files beyond the limits; at least the newest stays."""
        files = segments(self._folder)
        keep_steps, keep_mb = self.config.keep_steps, self.config.keep_mb
        num_bytes = sum(segment.path.stat().st_size for segment in files)
        for segment in files[:-1]:
            is_old = keep_steps is not None and segment.last <= files[-1].last - keep_steps
            if not is_old and not (keep_mb is not None and num_bytes > keep_mb * 10**6):
                return
            num_bytes -= segment.path.stat().st_size
            segment.path.unlink()


def _intact_lines(path: Path) -> list[bytes]:
    """Return the lines of steps in a file, up to where it is damaged."""
    lines = []
    with contextlib.suppress(*DAMAGE):
        lines.extend(line for line in sample_lines(path) if _step(line) >= 0)
    return lines


def _step(line: bytes) -> int:
    """Return the step of a sample's line; -1 if the line is damaged."""
    step = (decode(line) or {}).get("step")
    return step if isinstance(step, int) else -1
