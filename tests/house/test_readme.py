"""README.md quotes what is. `python tests/house/test_readme.py` writes them anew."""

import ast
import re
from pathlib import Path

from test_log import anchor

ROOT = Path(__file__).parents[2]
README, PACKAGE = ROOT / "README.md", ROOT / "src" / "qerl"


def the_loop() -> str:
    source = (PACKAGE / "training/loop.py").read_text()
    function = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "run"
    )
    return f"```python\n{ast.get_source_segment(source, function)}\n```"


QUOTES = {"loop": the_loop}


def block(text: str, mark: str) -> str:
    """Return the text between a mark and the next heading."""
    found = re.search(rf"<!-- {mark} -->\n\n(.*?)\n\n## ", text, flags=re.DOTALL)
    assert found, f"README.md has no block marked {mark}"
    return found[1]


def test_the_loop_is_quoted_as_it_is():
    assert block(README.read_text(), "loop") == the_loop()


def test_it_is_short():
    assert README.read_text().count("\n") <= 150


def test_its_reward_is_right_for_right_last_numbers_of_messages_and_texts():
    example = re.search(r"`reward.py`.*?```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert example
    names: dict = {}
    exec(compile(example[1], "README.md", "exec"), names)
    texts = ["42.", "41", "The result of 12 + 30 is 42", "42 and 3", "none"]
    for answers in ([[{"content": text}] for text in texts], texts):  # without a chat template: texts
        assert names["score"](answers, ["42"] * 5) == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_each_page_that_it_names_is_a_link_to_a_file():
    text = README.read_text()
    linked = re.findall(r"\]\(((?!http)[^)#]+)[^)]*\)", text)
    assert len(set(linked)) > 20 and not [path for path in linked if not (ROOT / path).exists()]
    assert not re.findall(r"(?<!\()\bdocs/[\w-]+\.md", text)


def test_each_heading_that_it_links_to_exists():
    links = re.findall(r"\]\(((?!http)[^)#]+\.md)#([^)]+)\)", README.read_text())
    headings = {
        path: {anchor(text) for text in re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.M)}
        for path, _ in links
    }
    assert links and not [(path, name) for path, name in links if name not in headings[path]]


if __name__ == "__main__":
    text = README.read_text()
    for mark, quote in QUOTES.items():
        pattern = rf"(<!-- {mark} -->\n\n)(?:.*?\n\n)??(## )"
        text = re.sub(pattern, rf"\1{mark} goes here\n\n\2", text, count=1, flags=re.DOTALL)
        text = text.replace(f"{mark} goes here", quote())
    README.write_text(text)
