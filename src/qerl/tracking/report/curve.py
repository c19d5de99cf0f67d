"""Curves as inline SVG: colours come from the page's style sheet, so that they suit light and dark.

horizontal   x = left + (value - low) / (high - low) * width          a logarithm first on a log scale
smoothed     mean of the 2 r + 1 neighbouring steps, r = steps // 60; the values themselves stay behind it
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import median
from typing import Any

from qerl.tracking.report.read import Points

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 8, 24
MAX_POINTS = 600
_SMOOTH_FROM = 60
_LOG_FROM = 20.0
"""A highest value this many times the median asks for a log scale; a lowest one far below it does not."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """What one curve shows; dots and rings are for values that are not there at every step."""

    label: str
    run_index: int
    points: Points
    mark: str = "line"
    """line, exact (a line that is not smoothed), dot or ring."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high): a shade behind the curve."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Values to pixels. Scale(low=0, high=10, first_px=50, last_px=470, warp=float)(5) == 260"""

    low: float
    high: float
    first_px: float
    last_px: float
    warp: Callable[[float], float]

    def __call__(self, value: float) -> float:
        low, high = self.warp(self.low), self.warp(self.high)
        return self.first_px + (self.warp(value) - low) / (high - low) * (self.last_px - self.first_px)


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in [low, high], 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten in [low, high]."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**i for i in range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))]


def smoothed(points: Points) -> Points:
    radius = len(points) // _SMOOTH_FROM
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    means = []
    for i, (x, _) in enumerate(points):
        first, last = max(0, i - radius), min(len(points), i + radius + 1)
        means.append((x, (sums[last] - sums[first]) / (last - first)))
    return means


def thinned(points: Points) -> Points:
    """At most MAX_POINTS of them, with the lowest and the highest of each stretch: no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    num_stretches, kept = MAX_POINTS // 2, []
    for i in range(num_stretches):
        first, last = i * len(points) // num_stretches, (i + 1) * len(points) // num_stretches
        stretch = sorted(points[first:last], key=lambda point: point[1])
        kept += sorted({stretch[0], stretch[-1]})
    return kept


def number_text(value: float) -> str:
    """For a tick or a tile: 812.4, 12,345, 2.1e-4."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def curves_svg(title: str, series: Sequence[Series]) -> str:
    """The curves on common axes; `series` holds at least one point."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    ys += [y for one in series for _, *ends in one.band for y in ends]
    x_scale = _horizontal(min(xs), max(xs))
    is_wide = min(ys) > 0 and max(ys) > _LOG_FROM * median(ys)
    y_scale, ticks = _log_vertical(ys) if is_wide else _linear_vertical(ys)
    drawn = [_curve(one, x_scale, y_scale) for one in series]
    return _frame(title, x_scale, y_scale, ticks, "".join(drawn))


def stack_svg(title: str, steps: Sequence[float], layers: Sequence[Sequence[float]], high: float) -> str:
    """Layers above each other; a step reaches from half a step before it to half a step behind it."""
    x_scale = _horizontal(steps[0] - 0.5, steps[-1] + 0.5)
    y_scale = _vertical(0.0, high, float)
    base, drawn = [0.0] * len(steps), []
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(steps)), steps[-1] + 0.5]
    for i, layer in enumerate(layers):
        top = [low + more for low, more in zip(base, layer, strict=True)]
        outline = [*_treads(edges, top), *reversed(_treads(edges, base))]
        points = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in outline)
        drawn.append(f'<polygon class="layer p{i}" points="{points}"/>')
        base = top
    return _frame(title, x_scale, y_scale, linear_ticks(0.0, high), "".join(drawn))


def hover_data(series: Sequence[Series]) -> list[dict[str, Any]]:
    """What the page's script needs to name the values under the pointer."""
    found = []
    for one in series:
        xs, ys = zip(*thinned(one.points), strict=True)
        points = list(zip(xs, rounded(ys), strict=True))
        found.append({"label": one.label, "run": one.run_index, "points": points})
    return found


def rounded(values: Sequence[float]) -> list[float]:
    """To four digits, as much as a reader takes in."""
    return [float(f"{value:.4g}") for value in values]


def _horizontal(low: float, high: float) -> Scale:
    pad = 0.5 if low == high else 0.0
    return Scale(low=low - pad, high=high + pad, first_px=LEFT, last_px=WIDTH - RIGHT, warp=float)


def _vertical(low: float, high: float, warp: Callable[[float], float]) -> Scale:
    return Scale(low=low, high=high, first_px=HEIGHT - BOTTOM, last_px=TOP, warp=warp)


def _linear_vertical(ys: Sequence[float]) -> tuple[Scale, list[float]]:
    low, high = min(ys), max(ys)
    # An axis that nearly reaches zero goes there: differences then keep their proportion.
    low = 0.0 if 0 < low < 0.4 * high else low
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = (low - pad if low else low), high + pad
    return _vertical(low, high, float), linear_ticks(low, high)


def _log_vertical(ys: Sequence[float]) -> tuple[Scale, list[float]]:
    low, high = min(ys) / 1.2, max(ys) * 1.2
    return _vertical(low, high, math.log10), log_ticks(low, high)


def _curve(one: Series, x_scale: Scale, y_scale: Scale) -> str:
    points = [(x_scale(x), y_scale(y)) for x, y in thinned(one.points)]
    if one.mark in ("dot", "ring") or len(points) == 1:
        kind, radius = "ring" if one.mark == "ring" else "dot", 3.5 if len(points) < 20 else 2.2
        dots = "".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in points)
        drawn = _line("curve between", points) + dots
    elif one.mark == "exact" or len(one.points) < _SMOOTH_FROM:
        drawn = _line("curve", points)
    else:
        bold = [(x_scale(x), y_scale(y)) for x, y in thinned(smoothed(one.points))]
        drawn = _line("curve raw", points) + _line("curve", bold)
    edge = [(x, low) for x, low, _ in one.band] + [(x, high) for x, _, high in reversed(one.band)]
    outline = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in edge)
    shade = f'<polygon class="band" points="{outline}"/>' if edge else ""
    kind = f"run s{one.run_index % 8}" + (" again" if one.run_index >= 8 else "")
    return f'<g class="{kind}" data-run="{one.run_index}">{shade}{drawn}</g>'


def _line(name: str, points: Points) -> str:
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _treads(edges: Sequence[float], heights: Sequence[float]) -> Points:
    return [(x, y) for i, y in enumerate(heights) for x in (edges[i], edges[i + 1])]


def _frame(title: str, x_scale: Scale, y_scale: Scale, ticks: Sequence[float], inside: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    rows = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y_scale(tick):.1f}" y2="{y_scale(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y_scale(tick) + 3.5:.1f}" text-anchor="end">{number_text(tick)}</text>'
        for tick in ticks
    )
    columns = "".join(
        f'<text x="{x_scale(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{number_text(tick)}</text>'
        for tick in linear_ticks(x_scale.low, x_scale.high, 6)
        if tick == int(tick)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'
        f' data-low="{x_scale.low}" data-high="{x_scale.high}">{rows}{columns}'
        f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>{inside}'
        f'<line class="pointer" x1="0" x2="0" y1="{TOP}" y2="{bottom}"/></svg>'
    )
