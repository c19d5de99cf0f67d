"""Appends a measurement as one line of JSON that says what source, GPU and libraries it comes from.

    {"bench": "linear", "shape": "qwen2.5-7b", "batch": 8, "provider": "qerl-nvfp4", "lora_rank": 32,
     "ms": 1.47, ..., "floor_fraction": 0.58, "commit": "782c2b4...", "is_dirty": false,
     "gpu": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0+cu130", "triton": "3.6.0",
     "driver": "580.159.04", "date": "2026-11-21"}

There is no row without a commit. Files that differ from it are refused, or the row is marked as dirty where
the user insists; the results' own folder is not looked at, for it changes with every row. The rows that are
committed are not dirty: tests/cli/bench/test_table.py.
"""

import dataclasses
import importlib.metadata
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qerl.errors import RunError, UserError
from qerl.tracking.provenance import git_state

ROOT = Path(__file__).parents[4]
RESULTS = Path("bench", "results")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    commit: str
    is_dirty: bool
    gpu: str
    capability: str
    """Compute capability, such as 9.0."""
    torch: str
    triton: str
    driver: str


def origin(*, allow_dirty: bool) -> Origin:
    """Of what is measured now, on torch's current CUDA device."""
    commit, is_dirty = source(ROOT, allow_dirty=allow_dirty)
    major, minor = torch.cuda.get_device_capability()
    return Origin(
        commit=commit,
        is_dirty=is_dirty,
        gpu=torch.cuda.get_device_name(),
        capability=f"{major}.{minor}",
        torch=torch.__version__,
        triton=importlib.metadata.version("triton"),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
    )


def source(root: Path, *, allow_dirty: bool) -> tuple[str, bool]:
    """The commit, and whether files differ from it."""
    state = git_state(root, exclude=RESULTS)
    if state is None:
        raise UserError(
            f"{root}: is no git checkout with a commit: a row says which source it measured, so bench runs"
            " from a checkout"
        )
    changed = state.changed_files
    if changed and not allow_dirty:
        first, more = changed[0], f" and {len(changed) - 1} more" * (len(changed) > 1)
        raise UserError(
            f"{first}{more} differs from the commit: commit it, or give --allow-dirty and --out FILE to"
            " measure without a lasting row"
        )
    return state.commit, bool(changed)


def default_file(gpu: str, root: Path = ROOT) -> Path:
    """NVIDIA H200 -> bench/results/h200.jsonl."""
    return root / RESULTS / f"{gpu.removeprefix('NVIDIA ').lower().replace(' ', '-')}.jsonl"


def append(file: Path, row: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """The whole row, as it was written."""
    facts = dataclasses.asdict(origin)
    assert len(origin.commit) == 40 and not row.keys() & facts.keys()
    whole = row | facts | {"date": datetime.now(UTC).date().isoformat()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps(whole) + "\n")
    except OSError as error:
        raise RunError(f"{file}: cannot be written: {error.strerror}") from error
    return whole


@dataclasses.dataclass(frozen=True, slots=True)
class RowWriter:
    """Rows(file, made_of).add({"bench": "learn", ...}) appends it to the file and prints it."""

    file: Path
    made_of: Origin

    def add(self, row: dict[str, Any]) -> None:
        print(json.dumps(append(self.file, row, self.made_of)), flush=True)


def rows_for(options: Any) -> RowWriter:
    """Of a benchmark with these options: where they say, else beside the other rows of this GPU."""
    made_of = origin(allow_dirty=options.allow_dirty)
    return RowWriter(options.out or default_file(made_of.gpu), made_of)


def read(folder: Path) -> list[dict[str, Any]]:
    """Every row, file by file in the order of their names, oldest first within each."""
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"{command[0]}: {error}") from error
    return done.stdout.strip()
