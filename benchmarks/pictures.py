"""Draw docs/images/system.svg and rounding.svg (rounding_cost.py); and run.svg, the curves of one run.

    python -m benchmarks pictures [--run runs/demo]

The curves of a study, docs/images/STUDY.svg, are drawn by `python -m studies pages`. Colors follow the
reader's light or dark setting. Curves are those of the report.
"""

import dataclasses
import itertools
import json
from pathlib import Path

from benchmarks.rounding_cost import cost_svg, read_arms
from qerl.bench.record import ROOT
from qerl.errors import UserError
from qerl.tracking.report.curve import Series, curves_svg
from qerl.tracking.report.page import asset
from qerl.tracking.report.read import Points
from qerl.tracking.report.svg import shapes_of, svg_document, svg_text

IMAGES = ROOT / "docs" / "images"
_STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e }
  .box { fill: #f6f8fa; stroke: #818b98 }
  .shared { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.5 }
  .arrow { fill: none; stroke: #59636e; stroke-width: 1.3; marker-end: url(#head) }
  #head path { fill: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .box { fill: #151b23; stroke: #656c76 }
    .shared { fill: #0c2d4a; stroke: #4493f8 } .arrow { stroke: #9198a1 } #head path { fill: #9198a1 }
  }
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z"/></marker></defs>"""

_CURVES = {
    "reward": "reward (dots: held-out accuracy)",
    "entropy": "entropy of the policy, nats",
    "sigma": "AQN's sigma",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PicturesOptions:
    run: Path | None = None
    """A run's folder to draw as docs/images/run.svg; None draws the others only."""


def draw_pictures(options: PicturesOptions) -> None:
    """Write the pictures to docs/images."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "system.svg").write_text(system_svg())
    (IMAGES / "rounding.svg").write_text(cost_svg(read_arms()))
    if options.run is not None:
        (IMAGES / "run.svg").write_text(run_svg(options.run))
    print(IMAGES)


def system_svg() -> str:
    """Return the picture of the parts of a step around the one packed model."""
    boxes = [
        _box(10, 80, 105, 60, "box", "prompts", "task"),
        _box(165, 80, 130, 60, "box", "engine", "samples groups"),
        _box(345, 80, 130, 60, "box", "rewards", "graders, sandbox"),
        _box(525, 80, 130, 60, "box", "advantages", "within each group"),
        _box(705, 80, 130, 60, "box", "learner", "loss, AdamW"),
        _box(165, 200, 670, 62, "shared", "one model", "frozen 4-bit weights + LoRA adapter"),
    ]
    arrows = [f"M{x} 110 H{x + 48}" for x in (116, 296, 476, 656)]
    arrows += ["M230 199 V142", "M770 199 V142", "M800 142 V199"]
    notes = [
        svg_text(240, 175, "reads the weights, plus AQN noise in the norms", "small", "start"),
        svg_text(810, 175, "updates LoRA", "small", "start"),
        svg_text(760, 175, "reads the same weights", "small", "end"),
        svg_text(430, 40, "one training step", "", "middle"),
        svg_text(430, 58, "no second copy of the weights, no merging, no weight sync", "small", "middle"),
    ]
    paths = (f'<path class="arrow" d="{d}"/>' for d in arrows)
    return svg_document(900, 280, [_STYLE, *boxes, *paths, *notes])


def run_svg(folder: Path) -> str:
    """Return three curves of a run: reward, entropy and sigma, with held-out accuracy before and after."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    if not steps:
        raise UserError(f"{folder}: metrics.jsonl has no steps")
    sigmas = [step["sigma"] for step in steps]
    starts = [i + 2.0 for i, (before, sigma) in enumerate(itertools.pairwise(sigmas)) if before == 0 < sigma]
    ends = [(0.0, result["accuracy_before"]), (float(len(steps)), result["accuracy_after"])]
    held_out = Series(label="held-out", run_index=1, points=ends, mark="dot")
    charts = []
    for i, (key, title) in enumerate(_CURVES.items()):
        points: Points = [(float(number), step[key]) for number, step in enumerate(steps, 1)]
        breaks = {} if key == "sigma" else dict.fromkeys(starts, "noise")
        mark = "exact" if key == "sigma" else "line"
        series = [Series(label=key, run_index=0, points=points, mark=mark, breaks=breaks)]
        svg = curves_svg(title, series + [held_out] * (key == "reward"), x_range=(0.0, float(len(steps))))
        title_text = svg_text(50, 0, title, "", "start")
        charts.append(f'<g transform="translate({490 * i} 20)">{title_text}{shapes_of(svg)}</g>')
    return svg_document(1470, 255, [f"<style>{asset('page.css')}</style>", *charts])


def _box(x: int, y: int, width: int, height: int, name: str, title: str, note: str) -> str:
    middle = x + width / 2
    return "\n".join(
        [
            f'<rect class="{name}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>',
            svg_text(middle, y + height / 2 - 3, title, "", "middle"),
            svg_text(middle, y + height / 2 + 15, note, "small", "middle"),
        ]
    )
