"""Format the short tables of the README: NVFP4 beside BF16 with equal settings, and the cost of exact mode.

Each line names GPU, KV type and LoRA rank, and both values come from rows that agree in everything but the
format of the weights. A value that was not measured, or from fewer than 3 runs, reads "not measured".
"""

import dataclasses
import itertools
from collections.abc import Callable

from benchmarks.rows import NOT_MEASURED, Row, gpu_name, has_enough_runs, markdown

_SAME = ("kv_gb", "micro_tokens", "optimizer", "head", "group_size", "prompt_tokens", "recompute")
"""Fields, besides those of a Line, that both rows of a line agree in."""
_SIDES = ("qerl-nvfp4", "qerl-bf16")
_MODES = (False, True)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Line("Sampling, 7B, 8 samples", "tok_per_s", {"bench": "decode", "batch": 8, ...})"""

    name: str
    figure: str
    case: Row

    def rows(self, rows: list[Row], *, modes: tuple[bool, ...] = (False,)) -> list[Row]:
        """Return the rows of this line that have enough runs; modes: the values of exact_mode to take."""
        wanted = {"head": "bf16", "noise_sigma": 0.0, "optimizer": "adamw", "kernels": "hopper"}
        wanted |= {"backward": "bf16", "flash_attention": 2}  # torch's own, which every installation has
        wanted |= self.case
        fits = (row for row in rows if all(row.get(k, v) == v for k, v in wanted.items()))
        fits = (row for row in fits if row.get("exact_mode", False) in modes)
        return [row for row in fits if self.figure in row and has_enough_runs(row)]


def _sampling(batch: int, rank: int) -> Line:
    case = {"bench": "decode", "shape": "qwen2.5-7b", "kv": "bf16", "group_size": 1, "max_tokens": 1024}
    return Line(
        f"sampling, 7B, {batch} samples in parallel, tokens/s",
        "tok_per_s",
        case | {"batch": batch, "lora_rank": rank},
    )


def _step(batch: int) -> Line:
    case = {"bench": "step", "shape": "qwen2.5-7b", "kv": "bf16", "max_tokens": 1024, "lora_rank": 32}
    name = f"training step, 7B, {batch} samples of 1,024 tokens, s"
    return Line(name, "step_s", case | {"batch": batch, "recompute": "none"})


def _memory(size: str, batch: int, kv: str) -> Line:
    case = {"bench": "memory", "shape": f"qwen2.5-{size.lower()}", "kv": kv, "max_tokens": 2048}
    name = f"peak memory of a step, {size}, {batch} samples of 2,048 tokens, GB"
    return Line(name, "peak_gb", case | {"batch": batch, "lora_rank": 32})


_UPDATE = {"bench": "learn", "shape": "qwen2.5-7b", "tokens": 8192, "sequence_tokens": 2048, "lora_rank": 32}
SPEED = (
    *(_sampling(batch, rank) for batch in (8, 64) for rank in (0, 32)),
    Line(
        "update, 7B, 8,192 tokens, tokens/s",
        "tok_per_s",
        _UPDATE | {"recompute": "none", "micro_tokens": 8192},
    ),
    _step(8),
    _step(64),
    _memory("72B", 8, "bf16"),
)
_FORMAT: dict[str, Callable[[float], str]] = {
    "tok_per_s": lambda value: f"{value:,.0f}",
    "step_s": lambda value: f"{value:.2f}",
    "peak_gb": lambda value: f"{value:.1f}",
}


def speed_table(rows: list[Row]) -> str:
    """Return NVFP4 beside BF16: a line per measurement, three columns per GPU."""
    gpus = sorted({gpu_name(row) for line in SPEED for row in line.rows(rows)}, reverse=True) or ["-"]
    lines: list[list[str]] = []
    for line in SPEED:
        setting = [str(line.case.get("kv", "-")), str(line.case["lora_rank"])]
        cells: list[str] = []
        for gpu in gpus:
            of_gpu = [row for row in line.rows(rows) if gpu_name(row) == gpu]
            values = [None if row is None else row[line.figure] for row in _pair(of_gpu, "provider", _SIDES)]
            cells += [NOT_MEASURED if value is None else _FORMAT[line.figure](value) for value in values]
            cells.append(_ratio(line.figure, values))
        lines.append([line.name, *setting, *cells])
    title = (
        "Qwen2.5 shapes, random weights, FlashAttention 2; medians of at least 3 runs. 256-token prompts,"
        " samples of 1,024 unless said; sampling: 1 sample a prompt, steps: 8. Ratio: how many times faster"
        " NVFP4 is than BF16 in the same code, at one commit if there are such rows; dev/speed.md has newer"
        " ones of some cases."
    )
    columns = [name for gpu in gpus for name in (f"{gpu.split()[0]} NVFP4", "BF16", "ratio")]
    return markdown(title, ["", "KV", "LoRA rank", *columns], lines, [])


def exact_table(rows: list[Row]) -> str:
    """Return whole steps with and without exact mode, at 1,024 tokens per sample."""
    shown: list[Row] = []
    lines: list[list[str]] = []
    for line in (_step(8), _step(64)):
        candidates = [row for row in line.rows(rows, modes=_MODES) if row["provider"] == _SIDES[0]]
        for gpu in sorted({gpu_name(row) for row in candidates}) or ["-"]:
            pair = _pair([row for row in candidates if gpu_name(row) == gpu], "exact_mode", _MODES)
            shown += (row for row in pair if row is not None)
            values = [None if row is None else row["step_s"] for row in pair]
            cells = [NOT_MEASURED if value is None else f"{value:.2f}" for value in values]
            off, on = values
            ratio = NOT_MEASURED if off is None or on is None else f"{on / off:.2f}x"
            lines.append([line.name, gpu, line.case["kv"], str(line.case["lora_rank"]), *cells, ratio])
    title = (
        "Training steps without and with exact mode (`engine.exact`), NVFP4, random weights; medians of at"
        " least 3 steps."
    )
    return markdown(title, ["", "GPU", "KV", "LoRA rank", "off", "exact mode", "cost"], lines, shown)


def _pair(rows: list[Row], name: str, values: tuple[object, object]) -> tuple[Row | None, Row | None]:
    """Return the latest rows with the two values of the field, equal in everything else.

    Rows of one commit come first: machines of one kind differ by up to 8 %, and those of a commit were mostly
    measured on one machine. Without such a pair the latest of each side stand beside each other.
    """
    first, second = ([row for row in rows if row.get(name, False) == value] for value in values)
    both = itertools.product(first, second)
    pairs = [pair for pair in both if all(pair[0].get(k) == pair[1].get(k) for k in _SAME)]
    if pairs:
        return next((pair for pair in reversed(pairs) if pair[0]["commit"] == pair[1]["commit"]), pairs[-1])
    return (first[-1] if first else None, None) if first else (None, second[-1] if second else None)


def _ratio(figure: str, values: list[float | None]) -> str:
    ours, other = values
    if ours is None or other is None:
        return NOT_MEASURED
    return f"{ours / other if figure == 'tok_per_s' else other / ours:.2f}x"
