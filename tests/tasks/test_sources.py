"""A changed reward has another hash, an unchanged one the same each time."""

import functools
import importlib
import os
import queue
import re
import subprocess
import sys
import threading

import numpy
import pytest
import torch

from qerl.config import TaskConfig
from qerl.tasks import RewardPool
from qerl.tasks.reward import resolve
from qerl.tasks.sources import function_sources
from qerl.trl.tools import make_environment, of_conversations

EVEN = """
LIMIT = 2

def helper(ids):
    return ids[0] % LIMIT == 0

def even(prompts, completions, completion_ids, **columns):
    return [float(helper(ids)) for ids in completion_ids]
"""


def of_file(folder, text=EVEN):
    (folder / "my.py").write_text(text)
    return function_sources([resolve(f"{folder / 'my.py'}:even", TaskConfig())]).hashes


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
    return function_sources([scope[name]]).hashes


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

    three, four = (function_sources([functools.partial(below, limit)]).hashes for limit in (3, 4))
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
    assert function_sources([resolve("numeric", TaskConfig())]) == ({}, [])


STATEFUL = """
import functools
from my_limits import LIMIT
import my_limits

BONUS = {"length": [1, 2]}

def helper(text):
    return len(text) < LIMIT + BONUS["length"][0] + my_limits.OTHER

def plain(completions, **columns):
    return [float(helper(text)) for text in completions]

class Below:
    scale = 1.0
    def __init__(self, limit):
        self.limit, self.parts = limit, {"a": [limit]}
    def __call__(self, completions, **columns):
        return [self.scale * (len(text) < self.limit) for text in completions]
    def method(self, completions, **columns):
        return self(completions)

class Slotted:
    __slots__ = ("limit",)
    def __init__(self, limit):
        self.limit = limit
    def __call__(self, completions, **columns):
        return [float(len(text) < self.limit) for text in completions]

def made(box):
    def inner(completions, **columns):
        return [float(len(text) < box[0]) for text in completions]
    return inner

def wrapped(function, weight=1.0):
    @functools.wraps(function)
    def outer(*args, **kwargs):
        return [weight * value for value in function(*args, **kwargs)]
    return outer

@functools.cache
def cached(limit):
    return limit

def uses_cached(completions, **columns):
    return [float(cached(3))]
"""


@pytest.fixture
def stateful(tmp_path, monkeypatch):
    """Loads the user's module anew, as a new process has it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_limits.py").write_text("LIMIT = 3\nOTHER = 4\n")
    (tmp_path / "stateful.py").write_text(STATEFUL)

    def load():
        for name in ("my_limits", "stateful"):
            sys.modules.pop(name, None)
        return importlib.import_module("stateful")

    yield load
    for name in ("my_limits", "stateful"):
        sys.modules.pop(name, None)


def changed(target, name, value):
    setattr(target, name, value)
    return target


def with_lambda(limit):
    return lambda completions, limit=limit: [limit]


STATES = {
    "an instance": (lambda u: u.Below(3), lambda u: u.Below(4)),
    "an attribute set later": (lambda u: u.Below(3), lambda u: changed(u.Below(3), "more", [1])),
    "a bound method": (lambda u: u.Below(3).method, lambda u: u.Below(4).method),
    "a list in an instance": (lambda u: u.Below([3]), lambda u: u.Below([3, 4])),
    "slots": (lambda u: u.Slotted(3), lambda u: u.Slotted(4)),
    "an attribute of a class": (lambda u: u.Below(3), lambda u: changed(u.Below, "scale", 2.0)(3)),
    "an instance in an instance": (lambda u: u.Below(u.Slotted(3)), lambda u: u.Below(u.Slotted(4))),
    "a partial": (lambda u: functools.partial(u.plain, 3), lambda u: functools.partial(u.plain, 4)),
    "a keyword": (lambda u: functools.partial(u.plain, a={1}), lambda u: functools.partial(u.plain, a={2})),
    "a partial of an instance": (
        lambda u: functools.partial(u.Below(3), a=1),
        lambda u: functools.partial(u.Below(4), a=1),
    ),
    "a list in a closure": (lambda u: u.made([3]), lambda u: u.made([4])),
    "a dict in a closure": (lambda u: u.made({0: 3}), lambda u: u.made({0: 4})),
    "a wrapped function": (lambda u: u.wrapped(u.made([3])), lambda u: u.wrapped(u.made([4]))),
    "a wrapper": (lambda u: u.wrapped(u.plain), lambda u: u.wrapped(u.plain, 2.0)),
    "a wrapped method": (lambda u: u.wrapped(u.Below(3).method), lambda u: u.wrapped(u.Below(4).method)),
    "a global": (lambda u: u.plain, lambda u: changed(u, "BONUS", {"length": [2, 2]}).plain),
    "an imported global": (lambda u: u.plain, lambda u: changed(u, "LIMIT", 5).plain),
    "of an imported module": (lambda u: u.plain, lambda u: changed(u.my_limits, "OTHER", 5) and u.plain),
    "a global function": (lambda u: u.plain, lambda u: changed(u, "helper", u.made([1])).plain),
    "an attribute of a function": (lambda u: u.plain, lambda u: changed(u.plain, "limit", 3)),
    "a default": (lambda u: u.plain, lambda u: changed(u.plain, "__kwdefaults__", {"a": 1})),
    "a lambda": (lambda u: with_lambda(u.Below(3)), lambda u: with_lambda(u.Below(4))),
    "a cached function": (
        lambda u: u.uses_cached,
        lambda u: changed(u, "cached", functools.cache(u.made([1]))).uses_cached,
    ),
    "an array": (lambda u: u.Below(numpy.arange(3)), lambda u: u.Below(numpy.arange(3.0))),
    "a tensor": (lambda u: u.Below(torch.ones(3)), lambda u: u.Below(torch.zeros(3))),
    "a module": (lambda u: u.Below(torch.nn.ReLU()), lambda u: u.Below(torch.nn.ELU())),
    "a pattern": (lambda u: u.Below(re.compile("a")), lambda u: u.Below(re.compile("a", re.IGNORECASE))),
    "1 and 1.0": (lambda u: u.Below(1), lambda u: u.Below(1.0)),
    "a function in one of qerl's": (
        lambda u: of_conversations(u.made([3]), set()),
        lambda u: of_conversations(u.made([4]), set()),
    ),
    "a reward of qerl's environment": (
        lambda u: make_environment([], None, [(u.made([3]), 1.0)])[0],
        lambda u: make_environment([], None, [(u.made([4]), 1.0)])[0],
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_reward_with_another_state_has_another_hash(name, stateful):
    one, other = STATES[name]
    first = function_sources([one(stateful())])
    assert first == function_sources([one(stateful())]), "equal state has equal hashes"
    second = function_sources([other(stateful())])
    assert first.hashes and first.hashes != second.hashes
    assert first.unknown == [] and second.unknown == []


def test_state_has_the_same_hash_in_any_process(tmp_path):
    (tmp_path / "words.py").write_text(
        "import random, re\nKEY = ('k', 1)\nWORDS = {'a', 'bc', 'def', KEY, ('l', 2), ('m', 3)}\n"
        "SEEDED = random.Random(3)\nPATTERN = re.compile('a')\n"
        "def reward(completions, **columns): return [len(WORDS) + KEY[1], SEEDED, PATTERN]\n"
    )
    code = "import words; from qerl.tasks.sources import function_sources as f; print(f([words.reward]))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environments = ({"PYTHONPATH": path, "PYTHONHASHSEED": seed} for seed in "123")
    printed = {subprocess.check_output([sys.executable, "-c", code], env=each) for each in environments}
    assert len(printed) == 1 and b"unknown=[]" in printed.pop()


UNREADABLE = {
    "a lock": threading.Lock,
    "a generator": lambda: (each for each in ()),
    "much memory": lambda: bytearray(1 << 27),
    "an object with a lock": queue.Queue,
    "a deep list": lambda: functools.reduce(lambda inner, _: [inner], range(200), []),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_state_that_cannot_be_read_is_named(kind, stateful):
    user, value = stateful(), UNREADABLE[kind]()
    found = function_sources([user.Below(value)])
    assert found.hashes and found.unknown[0].startswith("Below.limit")
    with RewardPool(TaskConfig(), [user.Below(value)]) as pool:
        (notice,) = pool.notices
    assert notice.startswith("a resumed run cannot tell") and "Below.limit" in notice


def test_a_reward_whose_attribute_changed_does_not_resume_silently(tmp_path, stateful):
    user = stateful()
    with RewardPool(TaskConfig(), [user.Below(3)]) as one, RewardPool(TaskConfig(), [user.Below(4)]) as other:
        assert one.sources.keys() == other.sources.keys() and one.sources != other.sources
