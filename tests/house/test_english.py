"""Docstrings of the package say what a thing is or does; none opens with a word that hides the subject."""

import ast
import re
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "qerl"
OPENINGS = re.compile(r"\s*(Of|What|Whether|How|Who|Whose|Where|When|Why)\b")


def riddles(source: str) -> list[int]:
    """Return the lines of docstrings, those below fields included, that open with one of these words."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and OPENINGS.match(node.value.value)
    ]


def test_docstrings_name_their_subject_first():
    found = {path: riddles(path.read_text()) for path in SRC.rglob("*.py")}
    assert len(found) > 400 and not {str(path): lines for path, lines in found.items() if lines}


def test_a_docstring_below_a_field_is_found_too():
    assert riddles('"""Whether it is."""\nx: int\n"""Of some rows."""\n"""The rows of some."""\n') == [1, 3]
