"""Read files that others wrote: regular files only, and JSON of bounded size and depth.

A fifo or a device may never end, a file of a gigabyte takes many times its size once it is parsed, and JSON
that nests deeply exhausts the stack of a function that walks through it.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 10_000_000
MAX_DEPTH = 100


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading without waiting; raise OSError for a folder, a fifo or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(0, "not a regular file", str(path))


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file; raise OSError, before reading, if it has more bytes."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise OSError(0, f"it has {num_bytes:,} bytes, the limit is {max_bytes:,}", str(path))
        return file.read(max_bytes)


def parse_json(text: bytes) -> Any:
    """Return the JSON value; raise ValueError if it is damaged, or nests deeper than MAX_DEPTH."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_DEPTH}") from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth_exceeds(value, MAX_DEPTH):
        raise ValueError(f"it nests deeper than {MAX_DEPTH}")
    return value


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [child for c in containers for child in (c.values() if isinstance(c, dict) else c)]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)
