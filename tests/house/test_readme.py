"""README.md quotes what is. `python tests/house/test_readme.py` writes them anew."""

import ast
import re
from pathlib import Path

from studies.findings import brief, results_in

ROOT = Path(__file__).parents[2]
README, PACKAGE = ROOT / "README.md", ROOT / "src" / "qerl"


def the_loop() -> str:
    source = (PACKAGE / "training/loop.py").read_text()
    function = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "run"
    )
    return f"```python\n{ast.get_source_segment(source, function)}\n```"


def the_tree() -> str:
    parts = sorted(path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "__init__.py"))
    lines = [f"    {name(part):14}{first_line(part)}" for part in parts]
    return "\n".join(["    src/qerl/", *(f"  {line}" for line in lines)])


def name(part: Path) -> str:
    return f"{part.name}/" if part.is_dir() else part.name


def first_line(part: Path) -> str:
    file = part / "__init__.py" if part.is_dir() else part
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    assert docstring, f"{file} says nothing of itself"
    return docstring.splitlines()[0].rstrip(".:")


def the_findings() -> str:
    return brief(results_in(ROOT / "studies"))


QUOTES = {"loop": the_loop, "tree": the_tree, "findings": the_findings}


def block(text: str, mark: str) -> str:
    """What stands between a mark and the next heading."""
    found = re.search(rf"<!-- {mark} -->\n\n(.*?)\n\n## ", text, flags=re.DOTALL)
    assert found, f"README.md has no block marked {mark}"
    return found[1]


def test_the_loop_is_quoted_as_it_is():
    assert block(README.read_text(), "loop") == the_loop()


def test_the_tree_is_complete_and_says_what_each_part_says_of_itself():
    assert block(README.read_text(), "tree") == the_tree()


def test_the_findings_are_those_of_the_studies_lines():
    assert block(README.read_text(), "findings") == the_findings()


def test_the_python_example_compiles_and_names_what_there_is():
    import qerl

    example = re.search(r"```python\n(import dataclasses.*?)```", README.read_text(), flags=re.DOTALL)
    assert example
    compile(example[1], "README.md", "exec")
    for path in re.findall(r"qerl\.([a-z_.]+)\(", example[1]):
        found = qerl
        for part in path.split("."):
            found = getattr(found, part)


if __name__ == "__main__":
    text = README.read_text()
    for mark, quote in QUOTES.items():
        pattern = rf"(<!-- {mark} -->\n\n)(?:.*?\n\n)??(## )"
        text = re.sub(pattern, rf"\1{mark} goes here\n\n\2", text, count=1, flags=re.DOTALL)
        text = text.replace(f"{mark} goes here", quote())
    README.write_text(text)
