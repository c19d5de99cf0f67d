"""Every form of a test is run: a right program passes it and a wrong one fails."""

import pytest
from sections import sections

from qerl.tasks.code import sandbox
from qerl.tasks.code.runner import Limits, run_test
from qerl.tasks.code.script import read_script
from qerl.tasks.code.test_cases import parse_tests

BACKEND = sandbox.choose(unsafe=True).backend  # these programs are harmless
LIMITS = Limits(60.0, memory_bytes=512 << 20, output_bytes=1 << 20, backend=BACKEND)
FORMS = {name: parts["program"] for name, parts in sections("forms.txt").items()}
RIGHT = FORMS.pop("RIGHT")
WRONG = RIGHT.replace("x * x", "x + x").replace("if x < 0", "if False").replace("squared", "doubled")
UNITTEST = "import unittest\nclass TestCases(unittest.TestCase):\n    "


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_run_and_can_fail(form):
    script = read_script(FORMS[form], "f")
    assert run_test(RIGHT, script, LIMITS)
    assert not run_test(WRONG, script, LIMITS)


def test_check_without_entry_point_takes_the_only_function():
    script = read_script(FORMS["check"])
    assert run_test("def f(x): return x * x", script, LIMITS)
    assert not run_test("def f(x): return x * x\ndef g(x): return 9", script, LIMITS)


def test_an_entry_point_that_is_none_is_an_error_of_the_row():
    with pytest.raises(ValueError, match="is not Python"):
        parse_tests(FORMS["check"], "f(")
    assert parse_tests(FORMS["check"], " f ") == parse_tests(FORMS["check"], "f")
    assert parse_tests(FORMS["check"], float("nan")) == parse_tests(FORMS["check"], "")  # of pandas


def test_check_takes_a_method_that_entry_point_names():
    script = read_script(FORMS["check"], "Solution().f")
    assert run_test("class Solution:\n    def f(self, x): return x * x", script, LIMITS)


NOT_RUN = {
    "assertion that would run": [
        "f(2)",
        "assert_right(f(2))",
        "def helper():\n    assert f(2) == 4",
        "def test_a():\n    assert True\n    f(2)",
        "assert (f(2) == 4, 'a tuple is true')",
        "def test_a():\n    print(f(2) == 4)",
        UNITTEST + "def test_a(self): f(2)",
    ],
    "names nothing of the program": [
        "assert 1 + 1 == 2",
        "def f(x): return 4\nassert f(2) == 4",
        "# assert f(2) == 4",
    ],
    "is not Python": ["assert f(2) = 4", "check(f", "\0"],
    "needs the fixture tmp_path": ["def test_a(tmp_path):\n    assert f(2) == 4"],
    "is not installed": ["from your_module import f\nassert f(2) == 4"],
    "uses pytest.importorskip": ["import pytest\npytest.importorskip('x')\nassert f(2) == 4"],
    "does not reach the program": [
        "from unittest.mock import patch\n@patch('builtins.input')\ndef test_a():\n    assert f(2) == 4",
        "from unittest import mock\ndef test_a():\n    with mock.patch.object(f, 'x'): assert f(2) == 4",
    ],
    "in a column entry_point": ["assert sum(abs(2), 2) == 4"],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "text"), [(each, text) for each in NOT_RUN for text in NOT_RUN[each]])
def test_a_test_that_could_not_run_or_fail_is_an_error_of_the_row(reason, text):
    with pytest.raises(ValueError, match=reason):
        read_script(text)


NONE_RAN = [
    "for x in f(0):\n    assert x > 0",
    "def test_a():\n    for x in f(0):\n        assert x > 0",
    "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f(0) == 4",
    "import pytest\ndef test_a():\n    if f(0) == []: pytest.skip()\n    assert f(0) == 4",
    UNITTEST + "@unittest.skip('later')\n    def test_a(self): self.assertEqual(f(0), 4)",
    UNITTEST + "@unittest.expectedFailure\n    def test_a(self): self.assertEqual(f(0), 4)",
    "import sys\nif not f(0): sys.exit(0)\nassert f(0) == 4",
]


@pytest.mark.parametrize("text", NONE_RAN)
def test_a_test_of_which_no_assertion_ran_has_not_passed(text):
    assert not run_test("def f(x): return []", read_script(text), LIMITS)
