"""Docstrings say what a thing is or does, names say what comes back, and commit subjects fit a line."""

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "qerl"
OPENINGS = re.compile(r"\s*(Of|What|Whether|How|Who|Whose|Where|When|Why)\b")
EMPTY_NAMES = re.compile("_*(found|given|kept|own|most|least|told|taught|worn|measured|asked|begun)_*", re.I)
EMPTY_PROSE = re.compile(r"\b(told|taught|worn|mend(ed|s)?|given up|so many|whoever|lacking)\b")
FIRST_CHECKED = "fb72673b"  # subjects of commits after this one have at most MAX_SUBJECT characters
MAX_SUBJECT = 72


def riddles(source: str) -> list[int]:
    """Return the lines of docstrings, those below fields included, that open with one of these words."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and OPENINGS.match(node.value.value)
    ]


def empty_names(source: str) -> list[tuple[int, str]]:
    """Return the lines and names of all that is defined or assigned under a name that says nothing."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.append((node.lineno, name))
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append((node.lineno, name))
    return [(line, name) for line, name in names if EMPTY_NAMES.fullmatch(name)]


def empty_prose(source: str) -> list[tuple[int, str]]:
    """Return the lines and words of comments and strings that say nothing, or not what they should."""
    kinds = tokenize.COMMENT, tokenize.STRING
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type in kinds]
    return [(each.start[0], word[0]) for each in tokens for word in EMPTY_PROSE.finditer(each.string)]


def faults(check) -> dict[str, list]:
    """Return what a check finds in the package's files, by file."""
    results = {str(path.relative_to(SRC)): check(path.read_text()) for path in SRC.rglob("*.py")}
    assert len(results) > 400
    return {path: lines for path, lines in results.items() if lines}


def test_docstrings_name_their_subject_first():
    assert not faults(riddles)


def test_a_docstring_below_a_field_is_checked_too():
    assert riddles('"""Whether it is."""\nx: int\n"""Of some rows."""\n"""The rows of some."""\n') == [1, 3]


def test_names_say_what_comes_back():
    assert not faults(empty_names)


def test_assigned_names_parameters_and_attributes_are_checked():
    source = (
        "def told(given, x):\n    self.kept = own = x\n    for found, _ in x: print(most)\nclass Worn: ...\n"
    )
    names = [(1, "told"), (4, "Worn"), (1, "given"), (2, "kept"), (2, "own"), (3, "found")]
    assert sorted(empty_names(source)) == sorted(names)


def test_comments_and_strings_use_the_words_of_the_field():
    assert not faults(empty_prose)


def test_words_in_comments_docstrings_and_messages_are_checked():
    source = '"""A task is told."""\nx = "must be mended"  # worn\ntold = 1\n'
    assert empty_prose(source) == [(1, "told"), (2, "mended"), (2, "worn")]


def test_pages_use_the_words_of_the_field():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    words = {
        page.name: sorted({word[0] for word in EMPTY_PROSE.finditer(page.read_text())}) for page in pages
    }
    assert not {name: used for name, used in words.items() if used}


def test_subjects_of_commits_fit_a_line():
    git = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{FIRST_CHECKED}..HEAD"]
    log = subprocess.run(git, capture_output=True, text=True)
    if log.returncode != 0:
        pytest.skip("not a clone with the project's history")
    assert not [subject for subject in log.stdout.splitlines() if len(subject) > MAX_SUBJECT]
