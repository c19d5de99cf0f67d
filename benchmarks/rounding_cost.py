"""What rounding to 4 bits costs, arm by arm: the table of docs/models.md and docs/images/rounding.svg.

Both are made of benchmarks/results/calibration/GPU.jsonl, rows that `python -m benchmarks calibration`
prints, and the table also of the study gsm8k_untrained. The latest row of an arm counts. GPTQ's settings
were chosen on the first 64 test questions; rows of other questions name them in `questions`. Rows of
a90bd20c have today's names: there `gptq` was `gptq+float0+fp32`, and today's `gptq` was
`gptq+float0.5+half`; its parts `rows` and `norms` are gone.
"""

import json
from pathlib import Path
from statistics import fmean

from benchmarks.rows import NOT_MEASURED, Row, wrapped
from qerl.bench.record import RESULTS, ROOT
from qerl.tracking.report.svg import svg_document, svg_text

FOLDER = ROOT / RESULTS / "calibration"
ACCURACIES = ROOT / "studies" / "gsm8k_untrained" / "results.jsonl"
ARMS = {
    "plain": "`model.scales plain`",
    "mse": "`model.scales mse`",
    "gptq+float0": "`mse`, GPTQ without the float model's inputs",
    "gptq": "`mse`, `model.calibrate gptq`",
    "gptq+kept0.03": "the same, 3 % of the bytes in BF16",
}
"""Arms that are shown, each with its name there."""
_EMPTY = "-"
_STUDY_ARMS = {"plain": "nvfp4", "mse": "nvfp4-mse", "gptq": "nvfp4-gptq"}
_STUDY_ONLY = {"bf16": "`model.format bf16`", "nf4": "`model.format nf4`", "mxfp4": "`model.format mxfp4`"}
"""Arms of which the table has the accuracy alone."""
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR, _TOP = 760, 300, 100, 44, 14, 34
_STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
  .small-model { fill: #0969da } .large-model { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .small-model { fill: #4493f8 } .large-model { fill: #ab7df8 }
  }
</style>"""
_CLASSES = "small-model", "large-model"


def read_arms(folder: Path = FOLDER) -> list[Row]:
    files = sorted(folder.glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row for row in rows if row["part"] == "arm"]


def read_accuracies(path: Path = ACCURACIES) -> dict[tuple[str, str], float]:
    """Return by size, such as 0.5B, and arm of the study the mean greedy accuracy of its seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        found.setdefault((_size(line["task"]), line["arm"]), []).append(line["final"]["greedy"])
    return {key: fmean(each) for key, each in found.items()}


def cost_table(rows: list[Row], accuracies: dict[tuple[str, str], float]) -> str:
    """Return a line for each shown arm: each model's KL and agreement on held-out questions, the KL on
    questions other than those, and the accuracy. A column without a figure is left out."""
    arms, latest, others = ARMS | _STUDY_ONLY, _latest(rows), _latest(rows, others=True)
    columns = [["", *arms.values()]]
    for model in _models(rows):
        figures = [
            _figures(latest.get((model, arm)), others.get((model, arm)), _accuracy(accuracies, model, arm))
            for arm in arms
        ]
        heads = [f"{_size(model)}: {head}" for head in ("KL", "top-1", "KL, other questions", "accuracy")]
        columns += [[head, *cells] for head, *cells in zip(heads, *figures, strict=True)]
    columns = [column for column in columns if set(column[1:]) != {_EMPTY}]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True)]
    lines.insert(1, "| --- " * len(columns) + "|")
    return "\n".join([*lines, "", wrapped(_sources(rows))])


def _accuracy(accuracies: dict[tuple[str, str], float], model: str, arm: str) -> float | None:
    return accuracies.get((_size(model), _STUDY_ARMS.get(arm, arm)))


def _figures(row: Row | None, other: Row | None, right: float | None) -> list[str]:
    return [
        _EMPTY if row is None else f"{row['kl']:.4f}",
        _EMPTY if row is None else f"{row['agreement']:.3f}",
        _EMPTY if other is None else f"{other['kl']:.4f}",
        _EMPTY if right is None else f"{right:.3f}",
    ]


def cost_svg(rows: list[Row]) -> str:
    """Return a bar of KL for each shown arm and model."""
    models, latest = _models(rows), _latest(rows)
    shown = [row for row in latest.values() if row["arm"] in ARMS]
    largest = max((row["answer_kl"] for row in shown), default=1.0)
    heading = "KL to the float weights on their own answers, nats a token"
    parts = [svg_text(_LEFT, 18, heading, "small", "start")]
    for index, (arm, name) in enumerate(ARMS.items()):
        top = _TOP + _ROW * index
        parts.append(svg_text(_LEFT - 10, top + 18, name.replace("`", ""), "", "end"))
        for at, model in enumerate(models[: len(_CLASSES)]):
            row = latest.get((model, arm))
            kl = None if row is None else row["answer_kl"]
            y, width = top + (_BAR + 2) * at, (_WIDTH - _LEFT - _RIGHT) * (kl or 0) / largest
            parts.append(
                f'<rect class="{_CLASSES[at]}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
            )
            label = NOT_MEASURED if kl is None else f"{kl:.4f}"
            text = f"{label}  {_size(model)}"
            parts.append(svg_text(round(_LEFT + width + 6, 1), y + 11, text, "small", "start"))
    height = _TOP + _ROW * len(ARMS)
    return svg_document(_WIDTH, height, [_STYLE, *parts])


def _models(rows: list[Row]) -> list[str]:
    return sorted({row["model"] for row in rows}) or ["-"]


def _latest(rows: list[Row], *, others: bool = False) -> dict[tuple[str, str], Row]:
    """Return the rows that count by model and arm; others: those of other questions."""
    return {(row["model"], row["arm"]): row for row in rows if ("questions" in row) == others}


def _size(model: str) -> str:
    """Return "0.5B" of qwen2.5-coder-0.5b-instruct."""
    sizes = [part.upper() for part in model.split("-") if part[:1].isdigit() and part[-1:].lower() in "bm"]
    return sizes[0] if sizes else model


def _sources(rows: list[Row]) -> str:
    sources = sorted({(row["gpu"], row["commit"][:8], row["date"]) for row in rows})
    return "; ".join(f"{gpu}, commit {commit}, {date}" for gpu, commit, date in sources)
