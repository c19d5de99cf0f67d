"""Format the short tables of the README: NVFP4 beside BF16 with equal settings, and the cost of exact mode.

Each line names GPU, KV type and LoRA rank, and both values come from rows that agree in everything but the
format of the weights. A value that was not measured, or from fewer than 3 runs, reads "not measured".
"""

import dataclasses
from collections.abc import Callable

from benchmarks.rows import NOT_MEASURED, Row, gpu_name, has_enough_runs, latest, markdown

_SAME = ("kv_gb", "micro_tokens", "optimizer", "head", "group_size", "prompt_tokens", "recompute")
"""Fields, besides those of a Line, that both rows of a line agree in."""
_SIDES = ("qerl-nvfp4", "qerl-bf16")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Line("Sampling, 7B, 8 samples", "tok_per_s", {"bench": "decode", "batch": 8, ...})"""

    name: str
    figure: str
    case: Row

    def rows(self, rows: list[Row]) -> list[Row]:
        """Return the rows of this line that have enough runs."""
        wanted = {"head": "bf16", "noise_sigma": 0.0, "exact_mode": False, "optimizer": "adamw"} | self.case
        fits = (row for row in rows if all(row.get(k, v) == v for k, v in wanted.items()))
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
    """Return NVFP4 beside BF16, a line per measurement and GPU."""
    lines: list[list[str]] = []
    for line in SPEED:
        candidates = line.rows(latest(rows))
        gpus = sorted({gpu_name(row) for row in candidates}) or ["-"]
        for gpu in gpus:
            sides = _sides([row for row in candidates if gpu_name(row) == gpu])
            values = [None if row is None else row[line.figure] for row in sides]
            cells = [NOT_MEASURED if value is None else _FORMAT[line.figure](value) for value in values]
            setting = [gpu, str(line.case.get("kv", "-")), str(line.case["lora_rank"])]
            lines.append([line.name, *setting, *cells, _ratio(line.figure, values)])
    title = (
        "Qwen2.5 shapes, random weights, 256-token prompts; medians of at least 3 runs. The ratio says how"
        " many times faster NVFP4 is than BF16 in the same code, or how many times less memory it takes."
        " The commit of every row stands in docs/speed.md."
    )
    header = ["", "GPU", "KV", "LoRA rank", "NVFP4", "BF16", "ratio"]
    return markdown(title, header, lines, [])


def exact_table(rows: list[Row]) -> str:
    """Return whole steps with and without exact mode, at 1,024 tokens per sample."""
    shown: list[Row] = []
    lines: list[list[str]] = []
    for line in (_step(8), _step(64)):
        sides_by_mode = [
            _of_provider(dataclasses.replace(line, case=line.case | {"exact_mode": mode}).rows(latest(rows)))
            for mode in (False, True)
        ]
        for gpu in sorted({*sides_by_mode[0], *sides_by_mode[1]}) or ["-"]:
            pair = [sides.get(gpu) for sides in sides_by_mode]
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


def _sides(rows: list[Row]) -> list[Row | None]:
    """Return the NVFP4 row and the BF16 row with the same settings; None where there is none."""
    ours = next((row for row in reversed(rows) if row["provider"] == _SIDES[0]), None)
    others = [row for row in rows if row["provider"] == _SIDES[1]]
    if ours is not None:
        others = [row for row in others if all(row.get(name) == ours.get(name) for name in _SAME)]
    return [ours, others[-1] if others else None]


def _of_provider(rows: list[Row]) -> dict[str, Row]:
    """Return the NVFP4 row of each GPU."""
    return {gpu_name(row): row for row in rows if row["provider"] == _SIDES[0]}


def _ratio(figure: str, values: list[float | None]) -> str:
    ours, other = values
    if ours is None or other is None:
        return NOT_MEASURED
    return f"{ours / other if figure == 'tok_per_s' else other / ours:.2f}x"
