"""Draw a study's main curves with their intervals: docs/images/STUDY.svg, which README.md shows.

The curves are those of the study's page; each ends in its arm's name and last mean. What the title says of
seeds, seconds and GPU is read from the lines. Colors follow the reader's light or dark setting.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qerl.tracking.report.curve import HEIGHT, LEFT, RIGHT, WIDTH, Series, curves_svg, scales_of
from qerl.tracking.report.page import asset
from qerl.tracking.report.svg import shapes_of, svg_document, svg_text
from studies.analysis import bands
from studies.results import Line, has_own_gpu
from studies.study import Curve, Picture, Study
from studies.verdict import MIN_SEEDS

_TOP, _LABELS, _FOOT, _EDGE, _APART = 68, 178, 26, 12, 17
STYLE = """
.study .back { fill: var(--card); stroke: var(--rule) } .study text { font-size: 12px }
.study .title { font-size: 15px; font-weight: 600; fill: var(--ink) }
.study .end { font-size: 13px; font-weight: 600; fill: var(--c) }
"""
"""Rules beside those of the report's page."""


def series_of(study: Study, lines: Sequence[Line], curve: Curve, task: str, arm: str) -> Series | None:
    """Return the mean of an arm's curve over its seeds, with 95 % intervals; None if it was not run."""
    of_arm = [line for line in lines if (line["task"], line["arm"]) == (task, arm)]
    points = bands(of_arm, curve)
    if not points:
        return None
    index = next(i for i, each in enumerate(study.arms) if each.name == arm)
    has_band = points[0][1].n >= MIN_SEEDS
    band = [(x, e.low, e.high) for x, e in points if has_band and e.low is not None and e.high is not None]
    means = [(float(x), e.mean) for x, e in points]
    return Series(label=arm, run_index=index, points=means, mark="exact", band=band)


def picture_svg(study: Study, lines: Sequence[Line]) -> str:
    """Return the study's picture for a page with STYLE, or nothing if it has none or no arm of it was run."""
    picture = study.picture
    if picture is None:
        return ""
    task = study.tasks[0].name
    found = [series_of(study, lines, picture.curve, task, arm) for arm in picture.arms]
    series = [one for one in found if one is not None]
    if not series:
        return ""
    shown = [line for line in lines if line["arm"] in picture.arms]
    width, height = 2 * _EDGE + WIDTH + _LABELS, _TOP + HEIGHT + _FOOT
    heads = [picture.title, *_facts(study, picture, shown)]
    texts = [
        svg_text(_EDGE + 6, 25 + 18 * i, text, "" if i else "title", "start") for i, text in enumerate(heads)
    ]
    middle = _EDGE + (LEFT + WIDTH - RIGHT) / 2
    texts.append(svg_text(middle, _TOP + HEIGHT + 14, picture.x_title, "", "middle"))
    curves = shapes_of(curves_svg(picture.title, series, ""))
    placed = f'<g transform="translate({_EDGE} {_TOP})">{curves}{_ends(study, series)}</g>'
    back = f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return svg_document(width, height, [f'<g class="study">{back}', *texts, f"{placed}</g>"])


def write_picture(study: Study, lines: Sequence[Line], folder: Path) -> Path | None:
    """Write FOLDER/STUDY.svg and return its path; None if there is nothing to draw."""
    svg = picture_svg(study, lines)
    if not svg:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    head, _, shapes = svg.partition("\n")
    style = f"<style>{asset('page.css')}svg {{ width: auto }}{STYLE}</style>"
    path = folder / f"{study.name}.svg"
    path.write_text("\n".join([head, style, shapes]))
    return path


def num_seeds(lines: Sequence[Line]) -> str:
    """Return "n = 8", or "n = 7 to 8" if arms have different numbers of runs."""
    counts = sorted(set(_runs_by_arm(lines).values()))
    return f"n = {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "")


def _runs_by_arm(lines: Sequence[Line]) -> Counter[str]:
    return Counter(line["arm"] for line in lines)


def seconds_text(lines: Sequence[Line]) -> str:
    """Return "95 to 99 s a run without loading, on one NVIDIA H200", of the runs that had a GPU to
    themselves; without such runs the GPU alone."""
    devices = " and ".join(sorted({line["device"] for line in lines}))
    seconds = sorted({round(line["final"]["train_s"]) for line in filter(has_own_gpu, lines)})
    if not seconds:
        return f"on {devices}, which the runs shared"
    text = " to ".join(map(str, {seconds[0]: None, seconds[-1]: None}))
    return f"{text} s a run without loading, on one {devices}"


def _facts(study: Study, picture: Picture, lines: Sequence[Line]) -> list[str]:
    runs = _runs_by_arm(lines)
    if min(runs.values()) >= MIN_SEEDS:
        spread = f"mean and 95 % interval over seeds, {num_seeds(lines)}"
    elif len(set(runs.values())) == 1:
        spread = f"mean, too few seeds for an interval, {num_seeds(lines)}"
    else:
        named = [f"{runs[arm.name]} ({arm.title})" for arm in study.arms if arm.name in runs]
        spread = f"means, n = {', '.join(named)}"
    return [f"{picture.curve.title}: {picture.curve.about}", f"{spread}; {seconds_text(lines)}"]


def _ends(study: Study, series: Sequence[Series]) -> str:
    """Return each curve's name and last value at its end, moved apart where they would overlap."""
    _, y_scale = scales_of(series)
    ends = sorted(((y_scale(one.points[-1][1]), one) for one in series), key=lambda end: end[0])
    texts, last = [], -_APART
    for y, one in ends:
        last = max(y, last + _APART)
        title = study.arms[one.run_index].title
        text = svg_text(
            WIDTH - RIGHT + 10, round(last + 4, 1), f"{title}  {one.points[-1][1]:.3f}", "end", "start"
        )
        texts.append(f'<g class="s{one.run_index % 8}">{text}</g>')
    return "".join(texts)
