"""Format all rows as the tables of dev/speed.md, a table for each kind of benchmark and GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.rows import NOT_MEASURED, OLDER, Row, gpu_name, has_enough_runs, latest, markdown
from qerl.bench.case import DecodeCase
from qerl.bench.decode import floor_figures
from qerl.bench.roofline import LIMITS

Columns = dict[str, Callable[[Row], str]]
_COLUMNS_ALWAYS_SHOWN = 3
_LIMIT = "in brackets the fraction of the limit set by memory bandwidth and matrix rate"


def all_tables(rows: list[Row]) -> str:
    return "\n\n".join(filter(None, (table(rows) for table in TABLES.values())))


def decode_tables(rows: list[Row]) -> str:
    """Return a table per GPU, shape and lengths: a line per setting, a column per batch."""

    def title(row: Row) -> str:
        return (
            f"**Sampling, {row['shape']} shape, {gpu_name(row)}**: tokens/s by batch, prefill included,"
            f" prompts of {row['prompt_tokens']:,} and samples of {row['max_tokens']:,} tokens, random"
            f" weights, median of at least 3 runs; {_LIMIT}, which includes the LM head in its own format."
        )

    settings = {
        "provider": "weights",
        "lora_rank": "LoRA rank",
        "kv": "KV",
        "kernels": "kernels",
        "head": "head",
        "noise_sigma": "noise",
        "group_size": "samples per prompt",
    }
    return _by_batch(rows, "decode", title, settings, _decode_cell)


def _decode_cell(row: Row) -> str:
    """Return the row's speed and its share of the floor as roofline.py computes it today.

    A row without floor_head stored a floor that counts a BF16 head in the format of the linears."""
    names = [field.name for field in dataclasses.fields(DecodeCase)]
    case = DecodeCase(**{name: _setting(row, name) for name in names})
    return f"{row['tok_per_s']:,.0f}{_fraction(floor_figures(case, row['tok_per_s'], row['gpu']))}"


def linear_tables(rows: list[Row]) -> str:
    def title(row: Row) -> str:
        return (
            f"**Linears, {row['shape']} shape, {gpu_name(row)}**: the linears of all layers in one decode"
            f" step, ms by batch; {_LIMIT}."
        )

    settings = {"provider": "library", "lora_rank": "LoRA rank"}
    return _by_batch(rows, "linear", title, settings, lambda row: f"{row['ms']:.2f}{_fraction(row)}")


def learn_tables(rows: list[Row]) -> str:
    rates = ", ".join(f"{gpu.split()[1]} {limit.flop_per_s / 1e12:.0f}" for gpu, limit in LIMITS.items())
    title = (
        "**Update, {gpu}**: packed sequences, random weights, median of at least 3 updates. Samples of a"
        " rollout: 8 of each prompt of 256 tokens, lengths as in `qerl bench rollout`. MFU counts 4"
        " operations per token and weight of the linears and the head, 6 with gradient checkpointing; it is a"
        f" fraction of what the GPU reaches in BF16 products of 8,192 x 8,192: {rates} TFLOP/s."
    )
    columns: Columns = {
        "shape": lambda row: row["shape"],
        "weights": lambda row: row["provider"],
        "LoRA rank": lambda row: str(row["lora_rank"]),
        "checkpointing": lambda row: row["recompute"],
        "sequences": _sequences,
        "FlashAttention": lambda row: str(_setting(row, "flash_attention")),
        "backward": lambda row: _setting(row, "backward"),
        "micro-batch": lambda row: f"{row.get('used_micro_tokens', row['micro_tokens']):,.0f}",
        "tokens/s": lambda row: _median(row, "tok_per_s", ",.0f"),
        "MFU": lambda row: "" if row["mfu"] is None else _median(row, "mfu", ".0%"),
        "peak GB": lambda row: f"{row['peak_gb']:.1f}",
    }
    return _lists(rows, "learn", title, columns)


def _sequences(row: Row) -> str:
    if row.get("num_samples"):
        return f"{row['num_samples']} samples of a rollout"
    return f"{row['tokens'] // row['sequence_tokens']} x {row['sequence_tokens']:,}"


def step_tables(rows: list[Row]) -> str:
    title = (
        "**Training step, {gpu}**: sampling, update and publishing, random weights; seconds are medians of at"
        " least 3 steps, GB the peak of allocated memory."
    )
    return _lists(rows, "step", title, _STEP)


def rollout_tables(rows: list[Row]) -> str:
    title = (
        "**Sampling of a whole step, {gpu}**: random weights, prompts of 256 tokens with 8 samples each,"
        " prefill included; lengths are the same in every run. First s: in a fresh process, with compiling"
        " and recording graphs; again s: median of at least 3 runs. Floor: the limit of memory bandwidth and"
        " matrix rate for these very steps. Below 8: seconds with fewer than 8 samples left."
    )
    columns: Columns = {
        "shape": lambda row: row["shape"],
        "weights": lambda row: row["provider"],
        "samples": lambda row: f"{row['num_samples']:,}",
        "lengths": _lengths,
        "at once": lambda row: f"{row['rows']:,}",
        "KV": lambda row: row["kv"],
        "head": lambda row: row["head"],
        "kernels": lambda row: row["kernels"],
        "first s": lambda row: f"{row['first_s']:.1f}",
        "again s": lambda row: _median(row, "call_s", ".1f"),
        "tokens/s": lambda row: _median(row, "tok_per_s", ",.0f"),
        "of the floor": lambda row: f"{row['floor_fraction']:.0%}" if row.get("floor_head") else "",
        **{f"below {n}": lambda row, n=n: f"{row[f'tail_{n}_s']:.1f}" for n in (8, 16, 32)},
        "peak GB": lambda row: f"{row['peak_gb']:.1f}",
        "commit": lambda row: (row["commit"] or "")[:7],
    }
    return _lists(rows, "rollout", title, columns)


def _lengths(row: Row) -> str:
    if row["lengths"] == "constant":
        return f"{row['median_tokens']:,} each"
    return f"median {row['median_tokens']:,}, sigma {row['sigma']:g}, at most {row['max_tokens']:,}"


def memory_tables(rows: list[Row]) -> str:
    title = (
        "**Memory of consecutive steps, {gpu}**: the first step warms up; growth is the last peak minus the"
        " first after the warm-up, over at least 3 steps."
    )
    columns: Columns = _STEP | {
        "cap GB": lambda row: "" if row["cap_gb"] is None else f"{row['cap_gb']:g}",
        "peak GB of each step": lambda row: ", ".join(f"{gb:.1f}" for gb in row["peaks_gb"]),
        "growth GB": lambda row: _median(row, "growth_gb", ".2f"),
    }
    return _lists(rows, "memory", title, columns)


def many_tables(rows: list[Row]) -> str:
    title = "**Training step on several GPUs, {gpu}**: samples of all GPUs together."
    columns: Columns = {"GPUs": lambda row: str(row["gpus"])} | _STEP
    columns |= {
        "samples/s": lambda row: (
            f"{row['batch'] / row['step_s']:.2f}" if has_enough_runs(row) else NOT_MEASURED
        ),
        "all-reduced MB": lambda row: f"{row['added_bytes'] / 1e6:.1f}",
        "gathered MB": lambda row: f"{row['gathered_bytes'] / 1e6:.1f}",
    }
    return _lists(rows, "many", title, columns)


def parity_tables(rows: list[Row]) -> str:
    title = (
        "**Engine against learner, {gpu}**: log-probabilities of the engine's samples, no noise, random"
        " weights. The random LM head is scaled to the target entropy; entropy is the mean over the"
        " tokens, in nats."
    )
    columns: Columns = {
        "shape": _shape,
        "weights": lambda row: row["provider"],
        "LoRA rank": lambda row: str(row["lora_rank"]),
        "KV": lambda row: row["kv"],
        "head": lambda row: row["head"],
        "samples": lambda row: f"{row['batch']} x {row['max_tokens']:,}",
        "exact mode": _exact_mode,
        "router replay": _router_replay,
        "target entropy": lambda row: f"{row['target_entropy']:g}",
        "entropy": lambda row: f"{row['entropy']:.2f}",
        "mean difference": lambda row: f"{row['abs_diff']:.2e}",
        "KL (k3)": lambda row: f"{row['kl']:.1e}",
        "max difference": lambda row: f"{row['max_diff']:.2g}",
    }
    return _lists(rows, "parity", title, columns)


def _shape(row: Row) -> str:
    return row["shape"] + (f", {row['num_layers']} layers" if row.get("num_layers") else "")


def _exact_mode(row: Row) -> str:
    return "yes" if row.get("exact_mode") else "no"


def _router_replay(row: Row) -> str:
    is_replayed = row.get("router_replay")
    return "-" if is_replayed is None else "yes" if is_replayed else "no"


def _median(row: Row, name: str, form: str) -> str:
    value = row[name]
    return f"{value:{form}}" if has_enough_runs(row) else NOT_MEASURED


def _fraction(row: Row) -> str:
    return "" if row["floor_fraction"] is None else f" ({row['floor_fraction']:.0%})"


_STEP: Columns = {
    "shape": lambda row: row["shape"],
    "weights": lambda row: row["provider"],
    "LoRA rank": lambda row: str(row["lora_rank"]),
    "samples": lambda row: f"{row['batch']} x {row['max_tokens']:,}",
    "checkpointing": lambda row: row["recompute"],
    "micro-batch": lambda row: f"{row.get('used_micro_tokens', row['micro_tokens']):,}",
    "KV": lambda row: row["kv"],
    "head": lambda row: row["head"],
    "kernels": lambda row: _setting(row, "kernels"),
    "FlashAttention": lambda row: str(_setting(row, "flash_attention")),
    "backward": lambda row: _setting(row, "backward"),
    "exact mode": _exact_mode,
    "step s": lambda row: _median(row, "step_s", ".2f"),
    "sampling s": lambda row: _median(row, "rollout_s", ".2f"),
    "update s": lambda row: _median(row, "learn_s", ".2f"),
    "peak GB": lambda row: f"{row['peak_gb']:.1f}",
}


def _lists(rows: list[Row], bench: str, title: str, columns: Columns) -> str:
    """Return a table per GPU with a line per case; the last cell of a case that failed names the error."""
    cases = [row for row in latest(rows) if row["bench"] == bench]
    tables = []
    for gpu in sorted({gpu_name(row) for row in cases}):
        shown = [row for row in cases if gpu_name(row) == gpu]
        lines = [[_cell(row, show) for show in columns.values()] for row in shown]
        for row, line in zip(shown, lines, strict=True):
            if "error" in row:
                line[-1] = row["error"].partition(":")[0]
        tables.append(markdown(title.format(gpu=gpu), list(columns), lines, shown))
    return "\n\n".join(tables)


def _cell(row: Row, show: Callable[[Row], str]) -> str:
    """Return the cell; a case that failed lacks most figures."""
    try:
        return show(row)
    except KeyError:
        assert "error" in row, row
        return ""


def _by_batch(
    rows: list[Row],
    bench: str,
    title: Callable[[Row], str],
    settings: dict[str, str],
    cell: Callable[[Row], str],
) -> str:
    """Return a table per GPU, shape and lengths, of the rows with enough runs.

    Settings after the third get a column where they differ, or are not what they were in all older rows."""
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in latest(rows):
        if row["bench"] == bench and has_enough_runs(row):
            place = row["gpu"], row["shape"], row.get("prompt_tokens"), row.get("max_tokens")
            places.setdefault(place, []).append(row)
    tables = []
    for _, cases in sorted(places.items(), key=str):
        batches = sorted({row["batch"] for row in cases})
        values = {key: {_setting(row, key) for row in cases} for key in settings}
        differing = {key for key, each in values.items() if len(each) > 1 or each - {OLDER.get(key, *each)}}
        shown = [key for i, key in enumerate(settings) if i < _COLUMNS_ALWAYS_SHOWN or key in differing]
        lines: dict[tuple[Any, ...], dict[int, str]] = {}
        for row in cases:
            key = tuple(_setting(row, name) for name in settings)
            lines.setdefault(key, {})[row["batch"]] = cell(row)
        places_shown = [list(settings).index(name) for name in shown]
        body = [
            [*(str(key[i]) for i in places_shown), *(cells.get(batch, NOT_MEASURED) for batch in batches)]
            for key, cells in lines.items()
        ]
        header = [*(settings[key] for key in shown), *map(str, batches)]
        tables.append(markdown(title(cases[0]), header, body, cases))
    return "\n\n".join(tables)


def _setting(row: Row, name: str) -> Any:
    return row[name] if name in row else OLDER[name]


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "sampling": decode_tables,
    "linears": linear_tables,
    "update": learn_tables,
    "step": step_tables,
    "rollout": rollout_tables,
    "memory": memory_tables,
    "many-gpus": many_tables,
    "parity": parity_tables,
}
"""By the name that a page marks it with."""
