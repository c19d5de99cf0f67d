"""The table and the picture of what rounding costs show the stored rows."""

import json
from xml.etree import ElementTree

from benchmarks.pictures import IMAGES
from benchmarks.rounding_cost import ARMS, cost_svg, cost_table, read_accuracies, read_arms

SOURCE = {"gpu": "NVIDIA H200", "commit": "0123456789", "date": "2026-11-29", "part": "arm"}
MODELS = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"


def row(model, arm, kl):
    figures = {"kl": kl, "answer_kl": 2 * kl, "agreement": 1 - kl, "answer_agreement": 1 - 2 * kl}
    return {"model": model, "arm": arm} | figures | SOURCE


ROWS = [row(MODELS[0], "plain", 0.5), row(MODELS[0], "plain", 0.05), row(MODELS[1], "mse", 0.025)]


def test_a_line_of_the_table_has_the_latest_row_of_each_model():
    lines = cost_table(ROWS, {}).splitlines()
    assert lines[0] == "|  | 0.5B: KL | 0.5B: top-1 | 1.5B: KL | 1.5B: top-1 |"
    assert lines[2] == f"| {ARMS['plain']} | 0.0500 | 0.950 | - | - |"
    assert lines[3] == f"| {ARMS['mse']} | - | - | 0.0250 | 0.975 |"
    assert lines[-1] == "NVIDIA H200, commit 01234567, 2026-11-29"


def test_other_questions_and_accuracies_have_their_own_columns():
    rows = [*ROWS, row(MODELS[0], "plain", 0.06) | {"questions": "65-320"}]
    lines = cost_table(rows, {("0.5B", "nvfp4"): 0.22, ("0.5B", "bf16"): 0.26}).splitlines()
    assert lines[0].startswith(
        "|  | 0.5B: KL | 0.5B: top-1 | 0.5B: KL, other questions | 0.5B: accuracy | 1.5B: KL"
    )
    assert lines[2].startswith(f"| {ARMS['plain']} | 0.0500 | 0.950 | 0.0600 | 0.220 | -")
    assert "| `model.format bf16` | - | - | - | 0.260 | - | - |" in lines
    assert cost_svg(rows) == cost_svg(ROWS)


def test_an_accuracy_is_the_mean_of_its_seeds(tmp_path):
    lines = [{"task": "gsm8k-0.5b", "arm": "nf4", "final": {"greedy": value}} for value in (0.25, 0.5)]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_accuracies(path) == {("0.5B", "nf4"): 0.375}
    assert read_accuracies(tmp_path / "none.jsonl") == {}


def test_bars_are_as_long_as_their_values():
    root = ElementTree.fromstring(cost_svg(ROWS))
    widths = [float(each.get("width")) for each in root if each.tag.endswith("rect")]
    assert len(widths) == 2 * len(ARMS) and widths[0] == 2 * widths[3] > 0
    assert sum(width > 0 for width in widths) == 2


def test_the_stored_picture_of_the_cost_is_what_is_drawn():
    assert (IMAGES / "rounding.svg").read_text() == cost_svg(read_arms())
