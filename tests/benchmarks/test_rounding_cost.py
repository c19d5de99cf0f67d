"""The table and the picture of what rounding costs show the stored rows."""

from xml.etree import ElementTree

from benchmarks.pictures import IMAGES
from benchmarks.rounding_cost import ARMS, cost_svg, cost_table, read_arms

SOURCE = {"gpu": "NVIDIA H200", "commit": "0123456789", "date": "2026-11-29", "part": "arm"}
MODELS = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"


def row(model, arm, kl):
    figures = {"kl": kl, "answer_kl": 2 * kl, "agreement": 1 - kl, "answer_agreement": 1 - 2 * kl}
    return {"model": model, "arm": arm} | figures | SOURCE


ROWS = [row(MODELS[0], "plain", 0.5), row(MODELS[0], "plain", 0.05), row(MODELS[1], "mse", 0.025)]


def test_a_line_of_the_table_has_the_latest_row_of_each_model():
    lines = cost_table(ROWS).splitlines()
    assert lines[0] == "|  | 0.5B: KL | top-1 | 1.5B: KL | top-1 |"
    assert lines[2] == f"| {ARMS['plain']} | 0.0500 | 0.950 | not measured | not measured |"
    assert lines[3] == f"| {ARMS['mse']} | not measured | not measured | 0.0250 | 0.975 |"
    assert lines[-1] == "NVIDIA H200, commit 01234567, 2026-11-29"


def test_bars_are_as_long_as_their_values():
    root = ElementTree.fromstring(cost_svg(ROWS))
    widths = [float(each.get("width")) for each in root if each.tag.endswith("rect")]
    assert len(widths) == 2 * len(ARMS) and widths[0] == 2 * widths[3] > 0
    assert sum(width > 0 for width in widths) == 2


def test_the_stored_picture_of_the_cost_is_what_is_drawn():
    assert (IMAGES / "rounding.svg").read_text() == cost_svg(read_arms())
