"""Marked tables of README.md and docs/ show the committed rows: `python -m benchmarks table --write`."""

import pytest

from benchmarks.families import filled
from benchmarks.pages import fill, pages
from benchmarks.rows import read_rows
from qerl.bench.record import RESULTS, ROOT


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.name)
def test_every_marked_table_is_current(page):
    text = page.read_text()
    assert fill(text, read_rows(ROOT / RESULTS), page.name) == text


def test_the_table_of_families_is_current():
    """`python -m benchmarks families --write` changes nothing."""
    page = (ROOT / "docs" / "models.md").read_text()
    assert filled(page) == page
