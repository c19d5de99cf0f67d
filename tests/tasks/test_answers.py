"""The table answers.tsv: pairs that mathematics calls equal or unequal, whatever the grader thinks.

What the table takes for granted: a unit, a sign of percent or of degrees that one side leaves out is not
missed; decimals are exact; a list has no order, a tuple has one; the last answer of a text is its answer.
`python tests/tasks/test_answers.py` prints the figures of the README.
"""

import csv
import logging
import time
from collections import Counter
from functools import cache
from pathlib import Path

import math_verify
import pytest

from qerl.config import TaskConfig
from qerl.tasks.graders import BUILT_IN

TABLE = Path(__file__).with_name("answers.tsv")
MATH_VERIFY_RIGHT = 0.75
"""math-verify 0.9 on the table; a floor, so that a change of either shows."""


def rows() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def ours(expected: str, given: str) -> bool:
    return BUILT_IN["math"](TaskConfig())(completions=[given], answer=[expected]) == [1.0]


def theirs(expected: str, given: str) -> bool:
    """math-verify as it does best: each side read bare and between dollars, and any two equal."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    golds, answers = ([parsed(text), parsed(f"${text}$")] for text in (expected, given))
    pairs = [(gold, answer) for gold in golds for answer in answers if gold and answer]
    return any(math_verify.verify(gold, answer, timeout_seconds=None) for gold, answer in pairs)


def parsed(text: str) -> list:
    return math_verify.parse(text, parsing_timeout=None)


@cache
def right() -> Counter:
    """(who, verdict of the table) -> how many they get right."""
    counts = Counter()
    for row in rows():
        is_equal = row["verdict"] == "equal"
        for name, grade in (("ours", ours), ("theirs", theirs)):
            counts[name, is_equal] += grade(row["expected"], row["given"]) == is_equal
    return counts


def summary() -> str:
    counts, table = right(), Counter(row["verdict"] for row in rows())
    pairs = f"{table.total()} pairs of answers, {table['equal']} equal and {table['unequal']} not"
    return (
        f"A table of {pairs}, tests it (`tests/tasks/answers.tsv`): it decides"
        f" {counts['ours', True]} and {counts['ours', False]} of them correctly,"
        f" math-verify {counts['theirs', True]} and {counts['theirs', False]}."
    )


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['expected']} {row['given']}")
def test_the_grader_says_what_mathematics_says(row):
    assert ours(row["expected"], row["given"]) == (row["verdict"] == "equal")


def test_the_table_is_large_and_has_both_verdicts_of_every_kind():
    table = rows()
    assert len(table) >= 300 and len({(row["expected"], row["given"]) for row in table}) == len(table)
    assert {row["verdict"] for row in table} == {"equal", "unequal"}
    kinds = {row["kind"] for row in table}
    assert len(kinds) >= 20
    assert {(row["kind"], row["verdict"]) for row in table} == {
        (kind, verdict) for kind in kinds for verdict in ("equal", "unequal")
    }


def test_math_verify_agrees_with_most_of_the_table():
    assert right()["theirs", True] + right()["theirs", False] >= MATH_VERIFY_RIGHT * len(rows())


def test_the_docs_say_what_the_table_says():
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")
    assert any(summary() in " ".join(page.read_text().split()) for page in pages)


@pytest.mark.parametrize(
    "text",
    ["because " * 4000 + "7", "(" * 900, "{" * 900, "$" * 5001, r"\frac" * 900, "1," * 5000, "a b " * 250],
)
def test_a_long_or_senseless_completion_is_wrong_and_costs_little_time(text):
    start_s = time.perf_counter()
    assert not ours("8", text)
    assert time.perf_counter() - start_s < 2


if __name__ == "__main__":
    print(summary())
