"""The stored results, summaries and findings agree with the studies' code."""

import shutil
from pathlib import Path

import pytest

from benchmarks.pictures import IMAGES
from studies.catalog import STUDIES
from studies.findings import MAX_LINES, brief, results_in, with_results, write_pictures
from studies.real_findings import lines_of_real_models, real_findings
from studies.run import rewrite_pages

FOLDER = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("name", with_results(FOLDER))
def test_a_stored_summary_is_what_its_lines_give(name, tmp_path):
    """A line is refused if its digest, of the config, is not that of the study's."""
    for file in (FOLDER / name).glob("*.jsonl"):
        shutil.copy(file, tmp_path)
    study = STUDIES[name]()
    rewrite_pages(study, tmp_path)
    for file in ("summary.md", "index.html", *(("headline.md", "verdicts.md") if study.picture else ())):
        assert (tmp_path / file).read_text() == (FOLDER / name / file).read_text(), file


def test_the_findings_are_what_the_lines_give():
    text = brief(results_in(FOLDER))
    assert f"{text}\n" == (FOLDER / "findings.md").read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert "Refuted: NF4 has a higher entropy than BF16 (-0.129 in" in text


def test_the_table_of_real_models_is_what_the_lines_give():
    text = real_findings(results_in(FOLDER, STUDIES), lines_of_real_models(FOLDER))
    assert f"{text}\n" == (FOLDER / "real.md").read_text()
    assert "| BF16 LoRA collapses more than NVFP4 at ten times the rate | **not shown** +0.0558" in text


def test_the_stored_pictures_are_what_the_lines_give(tmp_path):
    paths = write_pictures(FOLDER, tmp_path)
    assert "gsm8k_small.svg" in [path.name for path in paths]
    for path in paths:
        assert path.read_text() == (IMAGES / path.name).read_text()


def test_claims_about_gaussian_noise_have_five_draws():
    """The noise is drawn by seed and shared by both tasks: the smallest p of 5 draws is 0.0625."""
    judged = {one.claim.arm + one.claim.against: one for one in results_in(FOLDER)[0][1]}
    for pair in ("gaussianbf16", "nvfp4gaussian"):
        assert judged[pair].evidence.num_units == 5 and judged[pair].verdict == "not shown"
    assert judged["nf4bf16"].evidence.num_units == 10 and judged["nf4bf16"].verdict == "refuted"
