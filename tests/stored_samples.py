"""Read the samples of a run, wherever they are."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl.tracking.json_lines import decode
from qerl.tracking.sample_files import DAMAGE, sample_files, sample_lines


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
