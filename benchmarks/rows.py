"""Select the rows that tables show: the latest of each case, and figures only from enough runs.

A median needs at least 3 runs, and a growth of memory at least 3 steps after the warm-up. A row with fewer
runs gives no such figure: the table cell reads "not measured", even where another case has a value.
"""

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NOT_MEASURED = "not measured"
_MIN_RUNS = 3
_KEY = ("bench", "gpu", "shape", "provider", "lora_rank", "kv", "head", "group_size", "noise_sigma", "batch")
_KEY += ("gpus", "prompt_tokens", "max_tokens", "recompute", "tokens", "sequence_tokens", "micro_tokens")
_KEY += ("kernels", "optimizer", "kv_gb", "cap_gb", "target_entropy", "exact_mode", "router_replay")
_KEY += ("num_layers", "expert_rank", "flash_attention", "backward")
_KEY += ("num_samples", "rows", "lengths", "median_tokens", "sigma", "seed")
OLDER = {"kernels": "hopper", "flash_attention": 2, "backward": "bf16"}
"""Fields that older rows lack, and what they would be."""
_FAMILIES = {"8.0": "Ampere", "8.6": "Ampere", "8.9": "Ada", "9.0": "Hopper"}
_NEWER_FAMILIES = {"10": "Blackwell", "12": "Blackwell"}
_ALL_FAMILIES = ("Hopper", "Ampere", "Ada", "Blackwell")
_LINE_LENGTH = 118


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of all files, ordered by file name, oldest first within a file."""
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return one row per case, in the order of the cases: the last with enough runs, else the last."""
    cases: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row.get(name, OLDER.get(name)) or None for name in _KEY)  # older rows lack newer options
        if key not in cases or has_enough_runs(row) or not has_enough_runs(cases[key]):
            cases[key] = row
    return list(cases.values())


def has_enough_runs(row: Row) -> bool:
    """True if the row's medians are of at least 3 runs; rows of parity and errors have no medians."""
    return row.get("runs", row.get("steps", _MIN_RUNS)) >= _MIN_RUNS


def gpu_name(row: Row) -> str:
    return row["gpu"].removeprefix("NVIDIA ")


def coverage(rows: Iterable[Row]) -> str:
    """Hopper: measured (H200). Ampere, Ada, Blackwell: not measured."""
    names: dict[str, set[str]] = {}
    for row in rows:
        names.setdefault(family(row["capability"]), set()).add(gpu_name(row))
    shown = [f"{name}: measured ({', '.join(sorted(gpus))})" for name, gpus in sorted(names.items())]
    missing = [name for name in _ALL_FAMILIES if name not in names]
    if missing:
        shown.append(f"{', '.join(missing)}: {NOT_MEASURED}")
    shown.append(
        "GPUs from Ampere on use packed kernels, Hopper its own; older ones the PyTorch path of the same code"
    )
    return wrapped(". ".join(shown) + ".")


def family(capability: str) -> str:
    """Return the architecture's name of a compute capability: 9.0 -> Hopper."""
    newer = _NEWER_FAMILIES.get(capability.partition(".")[0])
    return _FAMILIES.get(capability) or newer or f"sm {capability}"


def sources(rows: Iterable[Row]) -> str:
    """Measured at commits 782c2b4, 8a1b2c3 (2026-11-21, torch 2.11.0+cu130, triton 3.6.0, driver 580)."""
    commits: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        software = row["date"], row["torch"], row["triton"], row["driver"]
        commits.setdefault(software, set()).add(row["commit"][:7])
    shown = [
        f"commit{'s' * (len(names) > 1)} {', '.join(sorted(names))} ({date}, torch {torch}, triton {triton},"
        f" driver {driver})"
        for (date, torch, triton, driver), names in sorted(commits.items())
    ]
    return wrapped(f"Measured at {'; '.join(shown)}.") if shown else ""


def markdown(title: str, header: list[str], lines: list[list[str]], rows: Iterable[Row]) -> str:
    """Return a caption, a table and the sources of its rows."""
    table = [header, ["---"] * len(header), *lines]
    text = "\n".join(f"| {' | '.join(line)} |" for line in table)
    return "\n\n".join(filter(None, [wrapped(title), text, sources(rows)]))


def wrapped(text: str) -> str:
    return textwrap.fill(text, _LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
