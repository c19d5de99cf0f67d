"""Rows made into tables, docs/speed.md's and the README's short one: the latest row of each case counts.

tests/house/test_readme.py holds both to exactly this.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from qerl.cli.bench.record import RESULTS, ROOT, read_rows
from qerl.errors import UserError

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]

_KEY = ("bench", "gpu", "shape", "provider", "lora_rank", "kv", "head", "group_size", "noise_sigma", "batch")
_KEY += ("gpus", "prompt_tokens", "max_tokens", "recompute", "tokens", "sequence_tokens", "micro_tokens")
_KEY += ("optimizer", "kv_gb", "cap_gb", "target_entropy", "exact_mode")
_SIDES = ("qerl-nvfp4", "qerl-bf16")
_USUAL = {"lora_rank": 32, "head": "bf16", "noise_sigma": 0.0, "exact_mode": False}
_SAMPLES = {"bench": "decode", "shape": "qwen2.5-7b", "kv": "bf16", "group_size": 1}
_STEPS = {"bench": "step", "shape": "qwen2.5-7b", "kv": "bf16", "max_tokens": 1024}
_LONG = {"bench": "memory", "max_tokens": 2048}
_SUMMARY: tuple[tuple[str, str, Row], ...] = (  # (what, its field, which row)
    ("7B, 8 samples at a time, tokens/s", "tok_per_s", _SAMPLES | {"batch": 8}),
    ("7B, 64 samples at a time, tokens/s", "tok_per_s", _SAMPLES | {"batch": 64}),
    (
        "7B, learning, tokens/s",
        "tok_per_s",
        {"bench": "learn", "shape": "qwen2.5-7b", "tokens": 8192, "recompute": "none"},
    ),
    ("7B, a whole step of 8 samples of 1,024 tokens, s", "step_s", _STEPS | {"batch": 8}),
    ("7B, a whole step of 64, s", "step_s", _STEPS | {"batch": 64}),
    (
        "7B, most memory of a step, 64 samples of 2,048, GB",
        "peak_gb",
        _LONG | {"shape": "qwen2.5-7b", "batch": 64},
    ),
    ("32B, the same, GB", "peak_gb", _LONG | {"shape": "qwen2.5-32b", "batch": 64}),
    ("72B, 8 samples of 2,048, GB", "peak_gb", _LONG | {"shape": "qwen2.5-72b", "batch": 8}),
)
_FIGURE: dict[str, Callable[[float], str]] = {
    "tok_per_s": lambda value: f"{value:,.0f}",
    "step_s": lambda value: f"{value:.2f}",
    "peak_gb": lambda value: f"{value:.1f}",
}
_FAMILIES = {"8.0": "Ampere", "8.6": "Ampere", "8.9": "Ada", "9.0": "Hopper"}
_NEWER = {"10": "Blackwell", "12": "Blackwell"}
_ALL_FAMILIES = ("Hopper", "Ampere", "Ada", "Blackwell")
_LINE_LETTERS = 118


def markdown(rows: Iterable[Row]) -> str:
    """Everything there is to show, and which GPUs it says nothing about."""
    kept = latest(rows)
    places = sorted(
        {(r["gpu"], r["shape"], r.get("prompt_tokens"), r.get("max_tokens")) for r in kept}, key=str
    )
    parts = [coverage(kept)]
    for bench, table in (("decode", decode_table), ("linear", linear_table)):
        for place in places:
            of_place = [r for r in kept if r["bench"] == bench and _place(r) == place]
            if of_place:
                parts.append(table(of_place))
    gpus = sorted({r["gpu"] for r in kept})
    for bench, table in LISTS.items():
        for gpu in gpus:
            of_gpu = [r for r in kept if r["bench"] == bench and r["gpu"] == gpu]
            if of_gpu:
                parts.append(table(of_gpu))
    return "\n\n".join(parts)


def summary(rows: Iterable[Row]) -> str:
    """A few rows for a reader in a hurry: NVFP4 beside BF16, a figure a line."""
    kept = latest(rows)
    shown: list[Row] = []
    lines: list[str] = []
    for name, key, case in _SUMMARY:
        wanted = _USUAL | case
        of_case = [r for r in kept if all(r.get(k, v) == v for k, v in wanted.items())]
        found = {r["provider"]: r for r in of_case}
        shown += (r for r in found.values() if r["provider"] in _SIDES)
        cells = [_FIGURE[key](found[side][key]) if side in found else "" for side in _SIDES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    gpus = ", ".join(sorted({row["gpu"] for row in shown}))
    title = f"**One {gpus}**: Qwen2.5's shapes, random weights, a LoRA adapter of rank 32 on all linears."
    head = ["| | NVFP4 | BF16, the same code |", "| --- | --- | --- |"]
    return "\n\n".join([_filled(title), "\n".join([*head, *lines]), _sources(shown), coverage(kept)])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    write: bool = False
    """Fill the marked tables of README.md and docs/*.md; otherwise print all tables."""


def write_tables(options: TableOptions) -> None:
    """Print every table, or write those that pages mark."""
    rows = read_rows(ROOT / RESULTS)
    if not options.write:
        print(markdown(rows))
        return
    for page in pages(ROOT):
        text = page.read_text()
        filled = fill(text, rows, page.name)
        if filled != text:
            page.write_text(filled)
            print(page)


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def fill(text: str, rows: list[Row], page: str) -> str:
    """Return the text with each `<!-- table NAME -->` ... `<!-- end -->` filled from the rows."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise UserError(f"{page}: there is no table {name}; choose from {', '.join(TABLES)}")
        return f"<!-- table {name} -->\n\n{TABLES[name](rows)}\n\n<!-- end -->"

    return _MARKED.sub(table, text)


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row of each case, in the order in which the cases first came."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        found[tuple(row.get(name) or None for name in _KEY)] = row  # what is off may have no field yet
    return list(found.values())


def coverage(rows: Iterable[Row]) -> str:
    """Hopper: measured (NVIDIA H200). Ampere, Ada, Blackwell: not measured."""
    names: dict[str, set[str]] = {}
    for row in rows:
        names.setdefault(family(row["capability"]), set()).add(row["gpu"])
    shown = [f"{name}: measured ({', '.join(sorted(gpus))})" for name, gpus in sorted(names.items())]
    missing = [name for name in _ALL_FAMILIES if name not in names]
    if missing:
        shown.append(f"{', '.join(missing)}: not measured")
    shown.append("The kernels written for Hopper run there alone; other GPUs take the same code's torch path")
    return _filled(". ".join(shown) + ".")


def family(capability: str) -> str:
    return _FAMILIES.get(capability) or _NEWER.get(capability.partition(".")[0]) or f"sm {capability}"


def decode_table(rows: list[Row]) -> str:
    """Of one GPU and shape: a line for each provider and setting, a column for each batch."""
    first = rows[0]
    title = (
        f"**Rollouts, {first['shape']} shape, {first['gpu']}**: tokens/s by batch, wall clock with prefill,"
        f" prompts of {first['prompt_tokens']} and samples of {first['max_tokens']} tokens, random weights;"
        " in brackets the share of what memory and matrix units allow."
    )

    def cell(row: Row) -> str:
        return f"{row['tok_per_s']:,.0f}{_share(row)}"

    names = ("weights", "LoRA rank", "KV", "head", "noise", "samples a prompt")
    keys = ("provider", "lora_rank", "kv", "head", "noise_sigma", "group_size")
    return _table(title, rows, dict(zip(keys, names, strict=True)), cell)


def linear_table(rows: list[Row]) -> str:
    first = rows[0]
    title = (
        f"**Linears, {first['shape']} shape, {first['gpu']}**: the four products of every layer, ms by batch;"
        " in brackets the share of what memory and matrix units allow."
    )

    def cell(row: Row) -> str:
        return f"{row['ms']:.2f}{_share(row)}"

    return _table(title, rows, {"provider": "provider", "lora_rank": "LoRA rank"}, cell)


def learn_table(rows: list[Row]) -> str:
    title = (
        f"**Learner, {rows[0]['gpu']}**: a step of packed sequences, random weights; MFU counts 4 operations"
        " a token and weight of linears and head, 6 where the forward pass is computed again."
    )
    columns: Columns = {
        "shape": lambda row: row["shape"],
        "weights": lambda row: row["provider"],
        "recompute": lambda row: row["recompute"],
        "tokens": lambda row: f"{row['tokens'] // row['sequence_tokens']} x {row['sequence_tokens']:,}",
        "at once": lambda row: f"{row.get('used_micro_tokens', row['micro_tokens']):,.0f}",
        "tokens/s": lambda row: f"{row['tok_per_s']:,.0f}",
        "MFU": lambda row: "" if row["mfu"] is None else f"{row['mfu']:.0%}",
        "peak GB": lambda row: f"{row['peak_gb']:.1f}",
    }
    return _list(title, rows, columns)


def step_table(rows: list[Row]) -> str:
    title = (
        f"**Whole steps, {rows[0]['gpu']}**: sampling, learning, publishing, random weights; s are medians,"
        " GB the most that torch allotted."
    )
    return _list(title, rows, _STEP)


def memory_table(rows: list[Row]) -> str:
    title = f"**Memory of steps in a row, {rows[0]['gpu']}**: the first warms up; growth is after it."
    columns: Columns = _STEP | {
        "cap GB": lambda row: "" if row["cap_gb"] is None else f"{row['cap_gb']:g}",
        "each step's GB": lambda row: ", ".join(f"{gb:.1f}" for gb in row["peaks_gb"]),
        "growth GB": lambda row: f"{row['growth_gb']:.2f}",
    }
    return _list(title, rows, columns)


def many_table(rows: list[Row]) -> str:
    title = f"**Whole steps on several GPUs, {rows[0]['gpu']}**: all samples are of all GPUs together."
    columns: Columns = {"GPUs": lambda row: str(row["gpus"])} | _STEP
    columns |= {
        "samples/s": lambda row: f"{row['batch'] / row['step_s']:.2f}",
        "added MB": lambda row: f"{row['added_bytes'] / 1e6:.1f}",
        "gathered MB": lambda row: f"{row['gathered_bytes'] / 1e6:.1f}",
    }
    return _list(title, rows, columns)


def parity_table(rows: list[Row]) -> str:
    title = (
        f"**Engine against learner, {rows[0]['gpu']}**: logprobs of the engine's samples, noise off, random"
        " weights with the head scaled for the entropy."
    )
    columns: Columns = {
        "shape": lambda row: row["shape"],
        "weights": lambda row: row["provider"],
        "KV": lambda row: row["kv"],
        "head": lambda row: row["head"],
        "samples": lambda row: f"{row['batch']} x {row['max_tokens']:,}",
        "exact mode": lambda row: "yes" if row.get("exact_mode") else "",
        "entropy": lambda row: f"{row['entropy']:.2f}",
        "mean difference": lambda row: f"{row['abs_diff']:.2e}",
        "KL (k3)": lambda row: f"{row['kl']:.1e}",
        "largest difference": lambda row: f"{row['max_diff']:.2g}",
    }
    return _list(title, rows, columns)


_STEP: Columns = {
    "shape": lambda row: row["shape"],
    "weights": lambda row: row["provider"],
    "samples": lambda row: f"{row['batch']} x {row['max_tokens']:,}",
    "recompute": lambda row: row["recompute"],
    "KV": lambda row: row["kv"],
    "exact mode": lambda row: "yes" if row.get("exact_mode") else "",
    "step s": lambda row: f"{row['step_s']:.2f}",
    "rollout s": lambda row: f"{row['rollout_s']:.2f}",
    "learn s": lambda row: f"{row['learn_s']:.2f}",
    "peak GB": lambda row: f"{row['peak_gb']:.1f}",
}
LISTS: dict[str, Callable[[list[Row]], str]] = {
    "learn": learn_table,
    "step": step_table,
    "memory": memory_table,
    "many": many_table,
    "parity": parity_table,
}
"""By the kind of row: a line for each."""


def _list(title: str, rows: list[Row], columns: Columns) -> str:
    """What a row that failed has no figure of is left empty, and its last cell says why."""
    cells = [[_cell(row, show) for show in columns.values()] for row in rows]
    for row, line in zip(rows, cells, strict=True):
        if "error" in row:
            line[-1] = row["error"].partition(":")[0]
    table = [list(columns), ["---"] * len(columns), *cells]
    return "\n".join([_filled(title), "", *(f"| {' | '.join(line)} |" for line in table), "", _sources(rows)])


def _cell(row: Row, show: Callable[[Row], str]) -> str:
    try:
        return show(row)
    except KeyError:
        assert "error" in row, row
        return ""


def _table(title: str, rows: list[Row], columns: dict[str, str], cell: Callable[[Row], str]) -> str:
    """A column whose value is the same in every row is left out, the first ones not."""
    shown = {k: v for i, (k, v) in enumerate(columns.items()) if i < 2 or len({r[k] for r in rows}) > 1}
    batches = sorted({row["batch"] for row in rows})
    lines: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in columns), {})[row["batch"]] = cell(row)
    places = [list(columns).index(key) for key in shown]
    body = [
        [*(str(key[place]) for place in places), *(cells.get(batch, "") for batch in batches)]
        for key, cells in lines.items()
    ]
    table = [[*shown.values(), *map(str, batches)], ["---"] * (len(shown) + len(batches)), *body]
    return "\n".join([_filled(title), "", *(f"| {' | '.join(line)} |" for line in table), "", _sources(rows)])


def _share(row: Row) -> str:
    return "" if row["floor_fraction"] is None else f" ({row['floor_fraction']:.0%})"


def _sources(rows: list[Row]) -> str:
    """Measured at commits 782c2b4, 8a1b2c3 (2026-11-21, torch 2.11.0+cu130, triton 3.6.0, driver 580)."""
    commits: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        where = row["date"], row["torch"], row["triton"], row["driver"]
        commits.setdefault(where, set()).add(row["commit"][:7])
    shown = [
        f"commit{'s' * (len(names) > 1)} {', '.join(sorted(names))} ({date}, torch {torch}, triton {triton},"
        f" driver {driver})"
        for (date, torch, triton, driver), names in sorted(commits.items())
    ]
    return _filled(f"Measured at {'; '.join(shown)}.")


def _filled(text: str) -> str:
    return textwrap.fill(text, _LINE_LETTERS, break_long_words=False, break_on_hyphens=False)


def _place(row: Row) -> tuple[Any, ...]:
    return row["gpu"], row["shape"], row.get("prompt_tokens"), row.get("max_tokens")


_MARKED = re.compile(r"<!-- table ([\w-]+) -->\n(?:.*?\n)??<!-- end -->", flags=re.DOTALL)
TABLES: dict[str, Callable[[list[Row]], str]] = {"speed": summary, "all": markdown}
"""By the name that a page marks it with."""
