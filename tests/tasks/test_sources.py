"""A changed reward has another hash, an unchanged one the same each time."""

import functools
import sys

import pytest

from qerl.config import TaskConfig
from qerl.tasks.reward import resolve
from qerl.tasks.sources import function_sources

EVEN = """
LIMIT = 2

def helper(ids):
    return ids[0] % LIMIT == 0

def even(prompts, completions, completion_ids, **columns):
    return [float(helper(ids)) for ids in completion_ids]
"""


def of_file(folder, text=EVEN):
    (folder / "my.py").write_text(text)
    return function_sources([resolve(f"{folder / 'my.py'}:even", TaskConfig())])


def of_main(folder, text, name="even"):
    """The hashes as a script's own function has them."""
    (folder / "script.py").write_text(text)
    return of_code(text, folder / "script.py", name)


def of_notebook(folder, text, name="even"):
    """The same where no file has the source."""
    return of_code(text, "<nowhere>", name)


def of_code(text, file, name):
    scope = {"__name__": "__main__", "__file__": str(file)}
    exec(compile(text, file, "exec"), scope)
    return function_sources([scope[name]])


def test_the_file_of_a_function_is_hashed_and_named(tmp_path):
    first = of_file(tmp_path)
    assert list(first) == ["reward even (my.py)"] and first == of_file(tmp_path)
    assert first != of_file(tmp_path, EVEN.replace("== 0", "!= 0"))


def test_a_module_of_ones_own_that_the_file_imports_is_hashed_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for number in (0, 1):
        (tmp_path / "my_limits.py").write_text(f"LIMIT = {number}")
        sys.modules.pop("my_limits", None)
        hashes.append(of_file(tmp_path, "import json\nimport my_limits\n" + EVEN))
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("hashed", [of_main, of_notebook])
@pytest.mark.parametrize(
    ("change", "is_noticed"),
    [
        (("== 0", "!= 0"), True),
        (("LIMIT = 2", "LIMIT = 3"), True),
        (("float(helper", "float(not helper"), True),
        (("LIMIT = 2", "LIMIT = 2\nOTHER = 3"), False),
    ],
)
def test_a_function_of_a_script_is_hashed_with_what_it_names(tmp_path, hashed, change, is_noticed):
    first = hashed(tmp_path, EVEN)
    assert "reward even" in first and first == hashed(tmp_path, EVEN)
    assert (first != hashed(tmp_path, EVEN.replace(*change))) == is_noticed


def test_an_environment_of_a_script_is_hashed_by_its_methods(tmp_path):
    text = "\nclass Game:\n    tries = 3\n    def reset(self, row): ...\n    def step(self, text): return 1"
    first = of_main(tmp_path, text, "Game")
    assert list(first) == ["reward Game"] and first == of_main(tmp_path, "\n\n" + text, "Game")
    for change in (("return 1", "return 2"), ("tries = 3", "tries = 4")):
        assert of_main(tmp_path, text.replace(*change), "Game") != first


def test_partials_and_lambdas_differ_by_what_they_are_given():
    def below(limit, completions, **columns):
        return [float(len(text) < limit) for text in completions]

    three, four = (function_sources([functools.partial(below, limit)]) for limit in (3, 4))
    assert three != four


def test_an_installed_package_of_another_environment_is_not_ones_own(tmp_path, monkeypatch):
    """It is on the path by a .pth file, say."""
    package = tmp_path / "other" / "site-packages"
    package.mkdir(parents=True)
    (package / "afar.py").write_text("LIMIT = 2\n")
    monkeypatch.syspath_prepend(package)
    text = EVEN.replace("LIMIT = 2", "from afar import LIMIT")
    before = of_file(tmp_path, text)
    (package / "afar.py").write_text("LIMIT = 2  # edited\n")
    assert of_file(tmp_path, text) == before


def test_built_in_rewards_have_no_source_of_their_own():
    assert function_sources([resolve("numeric", TaskConfig())]) == {}
