"""Draw a forest plot, the estimates and intervals of many arms, as inline SVG."""

from collections.abc import Sequence
from html import escape

from qerl.tracking.report.curve import linear_ticks, number_text
from studies.statistics import Estimate

WIDTH, LEFT, RIGHT, ROW = 480, 150, 14, 20


def forest_svg(title: str, rows: Sequence[tuple[str, int, Estimate]], baseline: str) -> str:
    """Return the SVG; rows: (arm, its index, its estimate). A line marks the baseline's mean."""
    ends = [end for _, _, e in rows for end in (e.mean, e.low, e.high) if end is not None]
    low, high = min(ends), max(ends)
    pad = 0.04 * (high - low) or 0.05 * abs(high) or 0.5
    low, high = low - pad, high + pad
    bottom = 8 + ROW * len(rows)

    def px(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    ticks = "".join(
        f'<line class="grid" x1="{px(t):.1f}" x2="{px(t):.1f}" y1="4" y2="{bottom}"/>'
        f'<text x="{px(t):.1f}" y="{bottom + 15}" text-anchor="middle">{number_text(t)}</text>'
        for t in linear_ticks(low, high)
    )
    mean = next((e.mean for arm, _, e in rows if arm == baseline), None)
    line = (
        ""
        if mean is None
        else f'<line class="axis" x1="{px(mean):.1f}" x2="{px(mean):.1f}" y1="4" y2="{bottom}"/>'
    )
    drawn = "".join(_row(arm, index, e, 8 + ROW * (i + 0.5), px) for i, (arm, index, e) in enumerate(rows))
    return (
        f'<svg viewBox="0 0 {WIDTH} {bottom + 22}" role="img" aria-label="{escape(title)}">'
        f"{ticks}{line}{drawn}</svg>"
    )


def _row(arm: str, index: int, e: Estimate, y: float, px) -> str:
    name = f'<text x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{escape(arm)}</text>'
    bar = ""
    if e.low is not None and e.high is not None:
        bar = f'<polyline class="curve" points="{px(e.low):.1f},{y:.1f} {px(e.high):.1f},{y:.1f}"/>'
    dot = f'<circle class="dot" cx="{px(e.mean):.1f}" cy="{y:.1f}" r="4"/>'
    return f'{name}<g class="s{index % 8}">{bar}{dot}</g>'
