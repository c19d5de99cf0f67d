"""Draw curves as inline SVG; the page's style sheet sets the colors, for light and dark mode.

position    x = left + (value - low) / (high - low) * width      of the logarithms on a log scale
smoothed    mean of 2 r + 1 neighboring steps, r = max(2, steps // 60); the raw values are shapes behind it

Pages without a script show these shapes too, so page.js draws no curve: it moves the shapes to another x axis
and shows the means of another strength, which a curve brings along.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from qerl.tracking.report.read import Points

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 8, 24
MAX_POINTS = 600
_NORMAL = 60
_REACHES = {120: 1, _NORMAL: 2, 30: 3, 12: 4}
"""From light to strongest smoothing: r = steps // reach, and the least r, which short runs have."""
_MIN_SMOOTHED = 8
"""Number of values from which on a curve has means."""
_MAX_MEANS = 300
_LOG_FROM = 20.0
"""A log scale is used if the largest value is more than this many times the median; a small one does not."""
_DODGE = 3.0
"""Pixels that dots move to the left and rings to the right, so that the bars of both are seen."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve; dots and rings are for values that are not measured at every step."""

    label: str
    run_index: int
    points: Points
    mark: str = "line"
    """line, exact (a line without smoothing), dot or ring."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high) of a shaded band behind the curve; of dots and rings, their error bars."""
    is_joined: bool = False
    """Dots and rings only: a dotted line joins them."""
    breaks: Mapping[float, str] = dataclasses.field(default_factory=dict)
    """Steps where noise starts or the reward changes: marked by this text, and no mean reaches across."""


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


def linear_ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """Return round numbers in [low, high] whose distance is 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """Return powers of ten in [low, high]."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**i for i in range(first, last + 1, max(1, math.ceil((last - first + 1) / max_ticks)))]


def smoothed(points: Points, breaks: Sequence[float] = (), reach: int = _NORMAL) -> list[Points]:
    """Return the means of each stretch between breaks, of values of that stretch alone.

    A long curve has them at every few steps, and at the last step of the stretch.
    """
    radius, stretches = max(_REACHES[reach], len(points) // reach), []
    stride = max(1, len(points) // _MAX_MEANS)
    for begin, end in itertools.pairwise([-math.inf, *breaks, math.inf]):
        stretch = [point for point in points if begin <= point[0] < end]
        sums = list(itertools.accumulate((y for _, y in stretch), initial=0.0))
        means = []
        for i in sorted({*range(0, len(stretch), stride), *range(len(stretch))[-1:]}):
            first, last = max(0, i - radius), min(len(stretch), i + radius + 1)
            means.append((stretch[i][0], (sums[last] - sums[first]) / (last - first)))
        stretches += [means] if means else []
    return stretches


def downsampled(points: Points) -> Points:
    """Return at most MAX_POINTS points: the lowest and the highest of each stretch, so that spikes stay."""
    if len(points) <= MAX_POINTS:
        return points
    edges = [i * len(points) // (MAX_POINTS // 2) for i in range(MAX_POINTS // 2 + 1)]
    ordered = (sorted(points[a:b], key=lambda point: point[1]) for a, b in itertools.pairwise(edges))
    return [point for stretch in ordered for point in sorted({stretch[0], stretch[-1]})]


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


def curves_svg(
    title: str, series: Sequence[Series], x_label: str = "step", x_range: tuple[float, float] | None = None
) -> str:
    """Draw the curves on common axes; `series` has at least one point."""
    x_scale, y_scale = scales_of(series, x_range)
    return _frame(title, x_scale, y_scale, "".join(_curve(one, x_scale, y_scale) for one in series), x_label)


def scales_of(
    series: Sequence[Series], x_range: tuple[float, float] | None = None
) -> tuple[AxisScale, AxisScale]:
    """Return the axes on which curves_svg draws these curves."""
    xs = x_range or [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    ys += [y for one in series for _, *ends in one.band for y in ends]
    x_scale = _horizontal(min(xs), max(xs))
    is_log = min(ys) > 0 and max(ys) > _LOG_FROM * median(ys)
    y_scale = _vertical(min(ys) / 1.2, max(ys) * 1.2, math.log10) if is_log else _linear_vertical(ys)
    return x_scale, y_scale


def stacked_svg(
    title: str, ends: Sequence[float], layers: Sequence[Sequence[float]], high: float, last: float
) -> str:
    """Draw stacked layers on an axis from 0 to `last`; each bar reaches from the end before it to its own."""
    x_scale, y_scale = _horizontal(0.0, last), _vertical(0.0, high, float)
    base, polygons, edges = [0.0] * len(ends), [], [0.0, *ends]
    for i, layer in enumerate(layers):
        top = [low + more for low, more in zip(base, layer, strict=True)]
        outline = [*_step_outline(edges, top), *reversed(_step_outline(edges, base))]
        points = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in outline)
        polygons += [f'<polygon class="layer p{i}" points="{points}"/>'] if any(layer) else []
        base = top
    return _frame(title, x_scale, y_scale, "".join(polygons), "step")


def chart_data(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the values that the page's script shows beside the pointer."""
    points = [[(x, rounded(y)) for x, y in downsampled(one.points)] for one in series]
    named = zip(series, points, strict=True)
    return [{"label": one.label, "run": one.run_index, "points": values} for one, values in named]


def rounded(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")


def _horizontal(low: float, high: float) -> AxisScale:
    pad = 0.5 if low == high else 0.0
    return AxisScale(low=low - pad, high=high + pad, first_px=LEFT, last_px=WIDTH - RIGHT, warp=float)


def _vertical(low: float, high: float, warp: Callable[[float], float]) -> AxisScale:
    return AxisScale(low=low, high=high, first_px=HEIGHT - BOTTOM, last_px=TOP, warp=warp)


def _linear_vertical(ys: Sequence[float]) -> AxisScale:
    low, high = min(ys), max(ys)
    # An axis that nearly reaches zero starts at zero, so that differences keep their proportion.
    low = 0.0 if 0 < low < 0.4 * high else low
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return _vertical(low - pad if low else low, high + pad, float)


def _curve(one: Series, x_scale: AxisScale, y_scale: AxisScale) -> str:
    def placed(points: Points) -> Points:
        return [(x_scale(x), y_scale(y)) for x, y in points]

    points = placed(downsampled(one.points))
    marks = "".join(_break(x_scale(x), text) for x, text in one.breaks.items())
    if one.mark in ("dot", "ring"):
        shapes = _dots(one, points, [(x_scale(x), y_scale(low), y_scale(high)) for x, low, high in one.band])
        return _group(one, shapes)
    if len(points) == 1:
        return _group(one, _dots(one, points, []) + marks)
    edge = [(x, low) for x, low, _ in one.band] + [(x, high) for x, _, high in reversed(one.band)]
    outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed(edge))
    shade = f'<polygon class="band" points="{outline}"/>' if edge else ""
    reaches = _REACHES if one.mark == "line" and len(one.points) >= _MIN_SMOOTHED else {}
    lines = _path("curve raw" if _NORMAL in reaches else "curve", points)
    for reach in reaches:
        means = map(placed, smoothed(one.points, sorted(one.breaks), reach))
        name = "curve" if reach == _NORMAL else "curve off"
        lines += _path(name, *means, attributes=f' data-reach="{reach}"')
    return _group(one, shade + lines + marks)


def _group(one: Series, shapes: str) -> str:
    kind = f"run s{one.run_index % 8}" + (" again" if one.run_index >= 8 else "")
    return f'<g class="{kind}" data-run="{one.run_index}">{shapes}</g>'


def _dots(one: Series, points: Points, bars: Sequence[tuple[float, float, float]]) -> str:
    kind, radius = "ring" if one.mark == "ring" else "dot", 3.5 if len(points) < 20 else 2.2
    shift = {"dot": -_DODGE, "ring": _DODGE}.get(one.mark, 0.0)
    line = _path("curve between", points) if one.is_joined else ""
    ends = "".join(f"M{x:.1f},{low:.1f} {x:.1f},{high:.1f}" for x, low, high in bars)
    dots = "".join(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in points)
    moved = (f'<path class="error" d="{ends}"/>' if ends else "") + dots
    return line + (f'<g transform="translate({shift:g})">{moved}</g>' if shift else moved)


def _break(x_px: float, why: str) -> str:
    """Mark a step; the text is on the side that has room."""
    dx, anchor = (4, "start") if x_px < WIDTH * 0.8 else (-4, "end")
    text = f'<text x="{x_px:.1f}" dx="{dx}" y="{TOP + 8}" text-anchor="{anchor}">{why}</text>'
    line = f'<path d="M{x_px:.1f},{TOP}V{HEIGHT - BOTTOM}"/>'
    return f'<g class="break">{line}{text}</g>'


def _path(name: str, *lines: Points, attributes: str = "") -> str:
    d = "".join("M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in line) for line in lines)
    return f'<path class="{name}" d="{d}"{attributes}/>'


def _step_outline(edges: Sequence[float], heights: Sequence[float]) -> Points:
    return [(x, y) for i, y in enumerate(heights) for x in (edges[i], edges[i + 1])]


def _frame(title: str, x_scale: AxisScale, y_scale: AxisScale, inside: str, x_label: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    ticks = (log_ticks if y_scale.warp is math.log10 else linear_ticks)(y_scale.low, y_scale.high)
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
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'{rows}<g class="x">{columns}'
        f'<text x="{LEFT - 22}" y="{bottom + 16}" text-anchor="end">{escape(x_label)}</text></g>'
        f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>{inside}'
        f'<line class="pointer" x1="0" x2="0" y1="{TOP}" y2="{bottom}"/></svg>'
    )
