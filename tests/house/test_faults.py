"""The attacks that dev/faults.md lists: each has a row with its test, and each test that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "dev" / "faults.md"
HEAD = "| attack | what happens | test |"


def rows() -> list[list[str]]:
    """The cells of each row of the section Attacks."""
    section = re.search(r"\n## Attacks\n(.*?)(\n## |\Z)", PAGE.read_text(), flags=re.DOTALL)
    assert section and HEAD in section[1]
    lines = [line for line in section[1].partition(HEAD)[2].splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [cells for cells in found if set("".join(cells)) - set("- ")]


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", text)


def test_each_attack_says_what_happens_and_names_a_test():
    assert len(rows()) >= 20
    for cells in rows():
        assert len(cells) == 3 and all(cells), cells
        assert named_tests(cells[2]) and re.fullmatch(r"(`tests/[\w/]+\.py::\w+`(, )?)+", cells[2]), cells


def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_named_test_exists():
    named: dict[str, set[str]] = {}
    for name in named_tests(PAGE.read_text()):
        file, _, function = name.partition("::")
        assert function.startswith("test_")
        named.setdefault(file, set()).add(function)
    assert len(named) > 10
    for file, wanted in named.items():
        assert wanted <= functions(file), (file, wanted - functions(file))


def test_each_file_of_tests_that_the_page_names_exists():
    files = re.findall(r"\btests/[\w/]+\.(?:py|json)\b", PAGE.read_text())
    assert files and not [file for file in files if not (ROOT / file).is_file()]
