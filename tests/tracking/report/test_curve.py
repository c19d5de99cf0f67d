"""Curves: positions, ticks, and downsampling that loses no spike."""

import re

import pytest

from qerl.tracking.report.curve import (
    MAX_POINTS,
    Series,
    chart_data,
    curves_svg,
    downsampled,
    linear_ticks,
    log_ticks,
    number_text,
    smoothed,
    stacked_svg,
)


def polylines(svg):
    """(class, points) of each line of each path that is shown."""
    found = re.findall(r'<path class="([^"]*)" d="([^"]*)"', svg)
    lines = [(name, line.split()) for name, d in found if "off" not in name for line in d.split("M")[1:]]
    return [(name, [tuple(map(float, pair.split(","))) for pair in pairs]) for name, pairs in lines]


def curve(points, mark="line", **fields):
    return curves_svg("t", [Series(label="a", run_index=0, points=points, mark=mark, **fields)])


def test_a_curve_lies_where_its_ticks_say():
    svg = curve([(0, 0.0), (5, 1.0), (10, 2.0)])
    ((name, points),) = polylines(svg)
    # 230 high, 8 above and 24 below; the axis reaches 5 % beyond 2.
    assert name == "curve"
    assert points == [(50, 206), (260, 111.7), (470, 17.4)]
    ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([^<]*)<', svg)
    assert ("115.2", "1") in ticks and ("209.5", "0") in ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 40, [0, 10, 20, 30, 40]),
        (-0.3, 0.3, [-0.2, 0, 0.2]),
        (742, 893, [750, 800, 850]),
    ],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_log_ticks_are_powers_of_ten():
    assert log_ticks(2e-5, 0.3) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert log_ticks(1e-10, 1) == pytest.approx([1e-10, 1e-7, 1e-4, 1e-1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.2, "0.2"),
        (812.44, "812.4"),
        (2.1e-4, "2.1e-4"),
        (12345, "12,345"),
        (3e8, "3e8"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_are_short(value, text):
    assert number_text(value) == text


def heights(values):
    ((_, points),) = polylines(curve(list(enumerate(values))))
    return [y for _, y in points]


def test_a_spike_far_above_the_rest_gets_a_log_scale():
    low, middle, high = heights([1e-4, 1e-4, 1e-4, 1e-3, 1e-2])[2:]
    assert low - middle == pytest.approx(middle - high, abs=0.2)


def test_a_dip_far_below_the_rest_gets_none():
    first, *_, dip = heights([1.0, 0.5, 1.0, 1e-6])
    middle = heights([1.0, 0.5, 1.0, 1e-6])[1]
    assert dip - middle == pytest.approx(middle - first, abs=0.2)


def test_a_long_curve_is_smoothed_with_its_values_behind():
    points = [(i, float(i % 2)) for i in range(300)]
    (raw, raw_points), (bold, bold_points) = polylines(curve(points))
    assert (raw, bold) == ("curve raw", "curve") and len(raw_points) == len(bold_points) == 300
    (means,) = smoothed(points)
    assert means[100] == (100, pytest.approx(6 / 11)) and means[0] == (0, pytest.approx(3 / 6))
    assert [name for name, _ in polylines(curve(points, mark="exact"))] == ["curve"]


def test_no_mean_reaches_across_the_start_of_noise_and_the_start_is_marked():
    points = [(i, float(i >= 100)) for i in range(300)]
    quiet, noisy = smoothed(points, breaks=[100])
    assert (quiet[-1], noisy[0]) == ((99, 0.0), (100, 1.0)) and len(quiet + noisy) == 300
    assert [means[-1][1] for means in smoothed(points)] == [1.0] and 0 < smoothed(points)[0][99][1] < 1
    svg = curve(points, breaks={100: "noise"})
    assert [name for name, _ in polylines(svg)] == ["curve raw", "curve", "curve"]
    x = f"{50 + 420 * 100 / 299:.1f}"
    assert ">noise</text>" in svg and f'<path d="M{x},' in svg and ">noise<" not in curve(points)


def test_a_long_curve_brings_its_means_for_another_smoothing():
    points = [(i, float(i % 10 == 0)) for i in range(6000)]
    one = Series(label="a", run_index=0, points=points, breaks={9.0: "noise"})
    (entry,) = chart_data([one])
    assert len(entry["points"]) == MAX_POINTS
    means = re.findall(r'd="M([^"]*)" data-reach="([0-9]+)"', curves_svg("t", [one]))
    assert [int(reach) for _, reach in means] == [120, 60, 30, 12]
    for reach in (120, 60, 30, 12):
        first, second = smoothed(points, [9.0], reach)
        assert 300 <= len(first + second) <= 310 and (first[-1][0], second[0][0]) == (8, 9)
        assert {round(mean, 2) for x, mean in second if 600 < x < 5400} == {0.1}
    assert "data-reach" not in curve(points, mark="exact")


def test_a_short_curve_is_smoothed_too_and_more_by_each_strength():
    drawn = [curve([(i, i) for i in range(num_steps)]) for num_steps in (7, 8, 59)]
    reaches = [re.findall('data-reach="([0-9]+)"', svg) for svg in drawn]
    assert reaches == [[], *[["120", "60", "30", "12"]] * 2]
    assert [name for name, _ in polylines(drawn[1])] == ["curve raw", "curve"]
    spike = [(i, float(i == 10)) for i in range(20)]
    peaks = [smoothed(spike, reach=reach)[0][10][1] for reach in (120, 60, 30, 12)]
    assert peaks == pytest.approx([1 / 3, 1 / 5, 1 / 7, 1 / 9])


def test_dots_are_joined_only_if_asked_and_have_error_bars():
    points, band = [(0, 0.5), (4, 0.75)], [(0, 0.25, 0.75), (4, 0.5, 1.0)]
    assert polylines(curve(points, mark="dot")) == []
    assert [name for name, _ in polylines(curve(points, mark="dot", is_joined=True))] == ["curve between"]
    bars = polylines(curve(points, mark="ring", band=band))
    assert [name for name, _ in bars] == ["error"] * 2
    assert [{x for x, _ in ends} for _, ends in bars] == [{50.0}, {470.0}]
    assert all(low > high for _, ((_, low), (_, high)) in bars)


def test_thinning_keeps_every_stretchs_extremes_in_order():
    points = [(i, 0.0) for i in range(10_000)]
    points[5003], points[7777] = (5003, 9.0), (7777, -9.0)
    kept = downsampled(points)
    assert len(kept) <= MAX_POINTS and (5003, 9.0) in kept and (7777, -9.0) in kept
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})


def test_a_single_value_is_a_dot_and_marks_are_drawn_as_asked():
    assert curve([(3, 0.5)]).count('<circle class="dot"') == 1
    assert curve([(3, 0.5), (4, 0.5)], mark="ring").count('<circle class="ring"') == 2


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 1e30])
def test_a_constant_has_axes(value):
    svg = curve([(0, value), (1, value)])
    assert "nan" not in svg and len(polylines(svg)[0][1]) == 2


def test_layers_stand_on_each_other():
    svg = stacked_svg("t", [1.0, 2.0], [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]], 4.0, 2.0)
    outlines = re.findall(r'class="layer p(\d)" points="([^"]*)"', svg)
    lower, upper = ([tuple(map(float, p.split(","))) for p in points.split()] for _, points in outlines)
    assert lower[:4] == [(50, 156.5), (260, 156.5), (260, 107), (470, 107)]
    assert upper[:4] == [(50, 8), (260, 8), (260, 107), (470, 107)]
    assert upper[4:] == lower[3::-1]


def test_titles_are_escaped():
    assert "<b>" not in curves_svg('"<b>', [Series(label="a", run_index=0, points=[(0, 1)])])
