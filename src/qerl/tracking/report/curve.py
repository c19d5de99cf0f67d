"""Draw curves as inline SVG; the page's style sheet sets the colors, for light and dark mode.

position    x = left + (value - low) / (high - low) * width      of the logarithms on a log scale
smoothed    mean of 2 r + 1 neighboring steps, r = steps // 60; the raw values are shapes behind it
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
"""A log scale is used if the largest value is more than this many times the median; a small one does not."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve; dots and rings are for values that are not measured at every step."""

    label: str
    run_index: int
    points: Points
    mark: str = "line"
    """line, exact (a line without smoothing), dot or ring."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high) of a shaded band behind the curve."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisScale:
    """Maps values to pixels: AxisScale(low=0, high=10, first_px=50, last_px=470, warp=float)(5) == 260."""

    low: float
    high: float
    first_px: float
    last_px: float
    warp: Callable[[float], float]

    def __call__(self, value: float) -> float:
        low, high = self.warp(self.low), self.warp(self.high)
        return self.first_px + (self.warp(value) - low) / (high - low) * (self.last_px - self.first_px)


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers in [low, high] whose distance is 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return powers of ten in [low, high]."""
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


def downsampled(points: Points) -> Points:
    """Return at most MAX_POINTS points: the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= MAX_POINTS:
        return points
    num_stretches, kept = MAX_POINTS // 2, []
    for i in range(num_stretches):
        first, last = i * len(points) // num_stretches, (i + 1) * len(points) // num_stretches
        stretch = sorted(points[first:last], key=lambda point: point[1])
        kept += sorted({stretch[0], stretch[-1]})
    return kept


def number_text(value: float) -> str:
    """Format a number for a tick or a tile: 812.4, 12,345, 2.1e-4."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Format the ticks with as many digits as they need to differ."""
    texts = list(map(number_text, ticks))
    return texts if len(set(texts)) == len(texts) else [f"{tick:.7g}" for tick in ticks]


def curves_svg(title: str, series: Sequence[Series], x_label: str = "step") -> str:
    """Draw the curves on common axes; `series` has at least one point."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    ys += [y for one in series for _, *ends in one.band for y in ends]
    x_scale = _horizontal(min(xs), max(xs))
    is_log = min(ys) > 0 and max(ys) > _LOG_FROM * median(ys)
    y_scale, ticks = _log_vertical(ys) if is_log else _linear_vertical(ys)
    curves = [_curve(one, x_scale, y_scale) for one in series]
    return _frame(title, x_scale, y_scale, ticks, "".join(curves), x_label)


def stacked_svg(title: str, steps: Sequence[float], layers: Sequence[Sequence[float]], high: float) -> str:
    """Draw stacked layers; each step is a bar that ends halfway to its neighbors."""
    x_scale = _horizontal(steps[0] - 0.5, steps[-1] + 0.5)
    y_scale = _vertical(0.0, high, float)
    base, polygons = [0.0] * len(steps), []
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in itertools.pairwise(steps)), steps[-1] + 0.5]
    for i, layer in enumerate(layers):
        top = [low + more for low, more in zip(base, layer, strict=True)]
        outline = [*_step_outline(edges, top), *reversed(_step_outline(edges, base))]
        points = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in outline)
        polygons.append(f'<polygon class="layer p{i}" points="{points}"/>')
        base = top
    return _frame(title, x_scale, y_scale, linear_ticks(0.0, high), "".join(polygons), "step")


def hover_data(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the values that the page's script shows under the pointer, with four digits."""
    data = []
    for one in series:
        points = [(x, float(f"{y:.4g}")) for x, y in downsampled(one.points)]
        data.append({"label": one.label, "run": one.run_index, "points": points})
    return data


def _horizontal(low: float, high: float) -> AxisScale:
    pad = 0.5 if low == high else 0.0
    return AxisScale(low=low - pad, high=high + pad, first_px=LEFT, last_px=WIDTH - RIGHT, warp=float)


def _vertical(low: float, high: float, warp: Callable[[float], float]) -> AxisScale:
    return AxisScale(low=low, high=high, first_px=HEIGHT - BOTTOM, last_px=TOP, warp=warp)


def _linear_vertical(ys: Sequence[float]) -> tuple[AxisScale, list[float]]:
    low, high = min(ys), max(ys)
    # An axis that nearly reaches zero starts at zero, so that differences keep their proportion.
    low = 0.0 if 0 < low < 0.4 * high else low
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = (low - pad if low else low), high + pad
    return _vertical(low, high, float), linear_ticks(low, high)


def _log_vertical(ys: Sequence[float]) -> tuple[AxisScale, list[float]]:
    low, high = min(ys) / 1.2, max(ys) * 1.2
    return _vertical(low, high, math.log10), log_ticks(low, high)


def _curve(one: Series, x_scale: AxisScale, y_scale: AxisScale) -> str:
    points = [(x_scale(x), y_scale(y)) for x, y in downsampled(one.points)]
    if one.mark in ("dot", "ring") or len(points) == 1:
        kind, radius = "ring" if one.mark == "ring" else "dot", 3.5 if len(points) < 20 else 2.2
        dots = "".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in points)
        shapes = _line("curve between", points) + dots
    elif one.mark == "exact" or len(one.points) < _SMOOTH_FROM:
        shapes = _line("curve", points)
    else:
        bold = [(x_scale(x), y_scale(y)) for x, y in downsampled(smoothed(one.points))]
        shapes = _line("curve raw", points) + _line("curve", bold)
    edge = [(x, low) for x, low, _ in one.band] + [(x, high) for x, _, high in reversed(one.band)]
    outline = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in edge)
    shade = f'<polygon class="band" points="{outline}"/>' if edge else ""
    kind = f"run s{one.run_index % 8}" + (" again" if one.run_index >= 8 else "")
    return f'<g class="{kind}" data-run="{one.run_index}">{shade}{shapes}</g>'


def _line(name: str, points: Points) -> str:
    return f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _step_outline(edges: Sequence[float], heights: Sequence[float]) -> Points:
    return [(x, y) for i, y in enumerate(heights) for x in (edges[i], edges[i + 1])]


def _frame(
    title: str, x_scale: AxisScale, y_scale: AxisScale, ticks: Sequence[float], inside: str, x_label: str
) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    rows = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y_scale(tick):.1f}" y2="{y_scale(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y_scale(tick) + 3.5:.1f}" text-anchor="end">{text}</text>'
        for tick, text in zip(ticks, tick_texts(ticks), strict=True)
    )
    columns = "".join(
        f'<text x="{x_scale(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{number_text(tick)}</text>'
        for tick in linear_ticks(x_scale.low, x_scale.high, 6)
        if tick == int(tick)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"'
        f' data-low="{x_scale.low}" data-high="{x_scale.high}">{rows}{columns}'
        f'<text x="{LEFT - 22}" y="{bottom + 16}" text-anchor="end">{escape(x_label)}</text>'
        f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>{inside}'
        f'<line class="pointer" x1="0" x2="0" y1="{TOP}" y2="{bottom}"/></svg>'
    )
