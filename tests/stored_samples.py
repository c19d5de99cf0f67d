"""Read the samples of a run, wherever they are, and write lines of its files."""

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl.tracking.json_lines import decode
from qerl.tracking.sample_files import DAMAGE, sample_files, sample_lines


def checked_line(text: str) -> bytes:
    """Return the line of this JSON object with its checksum."""
    content = text[:-1].encode()
    return content + b', "crc32": "%08x"}\n' % zlib.crc32(content)


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of every sample of a run that is there and intact, oldest first."""
    last = -1
    for path, _, newest in sample_files(folder):
        with contextlib.suppress(*DAMAGE):
            for record in map(decode, sample_lines(path)):
                step = (record or {}).get("step")
                if record is not None and isinstance(step, int) and step > last:
                    yield record
        last = max(last, newest)
