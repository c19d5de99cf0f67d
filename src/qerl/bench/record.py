"""Print and append benchmark rows: lines of JSON that name the measured source, GPU and libraries.

    {"bench": "decode", "shape": "qwen2.5-7b", "batch": 8, "provider": "qerl-nvfp4", "lora_rank": 32,
     "tok_per_s": 3672.0, ..., "floor_fraction": 0.46, "commit": "782c2b4...", "is_dirty": false,
     "qerl": "0.1.0", "gpu": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0+cu130", "triton": "3.6.0",
     "driver": "580.159.04", "date": "2026-11-21"}

In a checkout, a row holds the commit, and uncommitted changes are refused unless the user allows them.
Changes in benchmarks/results are ignored, since every row changes them. An installed package has no commit;
its rows are printed, and written only to a file that the user names. Committed rows are never dirty:
tests/benchmarks/test_table.py.
"""

import dataclasses
import importlib.metadata
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qerl.bench.options import BenchOptions
from qerl.errors import RunError, UserError
from qerl.tracking.provenance import git_state, version

ROOT = Path(__file__).parents[3]
RESULTS = Path("benchmarks", "results")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    commit: str | None
    is_dirty: bool | None
    """True if files differ from the commit. Both are None outside a checkout."""
    qerl: str | None
    """Version of the installed package; None if it is not installed."""
    gpu: str
    capability: str
    """Compute capability, such as 9.0."""
    torch: str
    triton: str
    driver: str


@dataclasses.dataclass(frozen=True, slots=True)
class RowWriter:
    """RowWriter(file, origin).add({"bench": "learn"}) prints the row and appends it to the file, if any."""

    file: Path | None
    origin: Origin

    def add(self, row: dict[str, Any]) -> None:
        facts = dataclasses.asdict(self.origin) | {"date": datetime.now(UTC).date().isoformat()}
        assert not row.keys() & facts.keys()
        line = json.dumps(row | facts)
        print(line, flush=True)
        if self.file is not None:
            _append(self.file, line)


def row_writer(options: BenchOptions) -> RowWriter:
    """Write to the file of the options; by default, rows of a clean checkout go to the file of this GPU."""
    origin = read_origin(allow_dirty=options.allow_dirty)
    file = options.out
    if file is None and origin.is_dirty is False:
        file = default_file(origin.gpu)
    return RowWriter(file, origin)


def read_origin(*, allow_dirty: bool) -> Origin:
    """Return the origin of rows measured now on the current CUDA device."""
    commit, is_dirty = source(ROOT, allow_dirty=allow_dirty)
    major, minor = torch.cuda.get_device_capability()
    return Origin(
        commit=commit,
        is_dirty=is_dirty,
        qerl=version("qerl"),
        gpu=torch.cuda.get_device_name(),
        capability=f"{major}.{minor}",
        torch=torch.__version__,
        triton=importlib.metadata.version("triton"),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
    )


def source(root: Path, *, allow_dirty: bool) -> tuple[str | None, bool | None]:
    """Return the commit and whether files differ from it; (None, None) if root is not a checkout."""
    state = git_state(root, exclude=RESULTS)
    if state is None:
        return None, None
    changed = state.changed_files
    if changed and not allow_dirty:
        first, more = changed[0], f" and {len(changed) - 1} more" * (len(changed) > 1)
        raise UserError(f"uncommitted changes in {first}{more}: commit them, or pass --allow-dirty")
    return state.commit, bool(changed)


def default_file(gpu: str, root: Path = ROOT) -> Path:
    """NVIDIA H200 -> benchmarks/results/h200.jsonl."""
    return root / RESULTS / f"{gpu.removeprefix('NVIDIA ').lower().replace(' ', '-')}.jsonl"


def _append(file: Path, line: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(line + "\n")
    except OSError as error:
        raise RunError(f"{file}: cannot be written: {error.strerror}") from error


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"{command[0]}: {error}") from error
    return done.stdout.strip()
