"""Pictures of the docs: drawn by the code that the repository has, with the report's curves."""

import json
from xml.etree import ElementTree

from benchmarks.pictures import IMAGES, run_svg, system_svg


def test_the_stored_picture_is_what_is_drawn():
    assert (IMAGES / "system.svg").read_text() == system_svg()


def test_a_picture_of_a_run_has_the_reports_curves(tmp_path):
    steps = [{"reward": i / 100, "entropy": 1.0, "sigma": 0.01 * (i >= 40)} for i in range(100)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "result.json").write_text(json.dumps({"accuracy_before": 0.25, "accuracy_after": 0.75}))
    svg = run_svg(tmp_path)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    # Sigma is not smoothed, and has no mark where noise starts.
    assert svg.count('class="curve raw"') == 2 and svg.count(">noise<") == 2 and svg.count("<circle") == 2
