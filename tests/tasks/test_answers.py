"""The table answers.tsv: pairs that mathematics calls equal or unequal, whatever the grader thinks.

What the table takes for granted: a unit, a sign of percent or of degrees that one side leaves out is not
missed; decimals are exact; a list has no order, a tuple has one; the last answer of a text is its answer.
`python tests/tasks/test_answers.py` prints the figures of docs/evaluate.md.
"""

import csv
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import math_verify
import pytest

from qerl.config import TaskConfig
from qerl.tasks.graders import BUILT_IN

TABLE = Path(__file__).with_name("answers.tsv")
MATH_VERIFY = {"equal": 354, "unequal": 198}
"""Rows that math-verify 0.9 gets right; running this file counts them, which takes 20 s."""


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


def num_right(grade, table: list[dict[str, str]]) -> Counter:
    """Return how many rows of each verdict this grader gets right."""
    return Counter(r["verdict"] for r in table if is_right(grade, r))


def is_right(grade, row: dict[str, str]) -> bool:
    return grade(row["expected"], row["given"]) == (row["verdict"] == "equal")


def summary(math_verify: Mapping[str, int]) -> str:
    table = Counter(row["verdict"] for row in rows())  # ours is right on every row: the test below
    pairs = f"{table.total()} pairs of answers, {table['equal']} equal and {table['unequal']} not"
    return (
        f"A table of {pairs}, tests it (`tests/tasks/answers.tsv`): it decides"
        f" {table['equal']} and {table['unequal']} of them correctly;"
        f" math-verify decides {math_verify['equal']} and {math_verify['unequal']}."
    )


def test_the_grader_says_what_mathematics_says():
    assert not [row for row in rows() if not is_right(ours, row)]


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
    """One row in eight: another version of math-verify that differs shows."""
    some = rows()[::8]
    assert num_right(theirs, some).total() >= 0.75 * len(some)


def test_the_docs_say_what_the_table_says():
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")
    assert any(summary(MATH_VERIFY) in " ".join(page.read_text().split()) for page in pages)


@pytest.mark.parametrize(
    "text",
    ["because " * 4000 + "7", "(" * 900, "{" * 900, "$" * 5001, r"\frac" * 900, "1," * 5000, "a b " * 250],
)
def test_a_long_or_senseless_completion_is_wrong_and_costs_little_time(text):
    start_s = time.process_time()
    assert not ours("8", text)
    assert time.process_time() - start_s < 2


if __name__ == "__main__":
    print(summary(num_right(theirs, rows())))
