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
    "expectedFailure": [
        UNITTEST + "@unittest.expectedFailure\n    def test_a(self): self.assertEqual(f(0), 4)"
    ],
    "load_tests": [UNITTEST + "def test_a(self): self.assertEqual(f(2), 4)\ndef load_tests(*a): return a[1]"],
    "mark.xfail": ["import pytest\n@pytest.mark.xfail\ndef test_a():\n    assert f(2) == 5"],
    "assertLogs": [UNITTEST + "def test_a(self):\n        with self.assertLogs(): f(2)"],
    "its own assertions fails": [
        "try:\n    assert f(2) == 4\nexcept AssertionError:\n    assert f(2) == 5",
        "try:\n    assert f(2) == 4\nexcept:\n    assert f(2) == 5",
        "import pytest\ndef test_a():\n    with pytest.raises(AssertionError): assert f(2) == 5",
        UNITTEST + "def test_a(self):\n        with self.assertRaises(AssertionError):\n"
        "            self.assertEqual(f(2), 5)",
    ],
    "doctest": ["import doctest\nassert f(2) == 4\ndoctest.testmod()"],
    "defines test_a twice": ["def test_a():\n    assert f(2) == 5\ndef test_a():\n    assert f(2) == 4"],
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
    "import sys\nif not f(0): sys.exit(0)\nassert f(0) == 4",
]


@pytest.mark.parametrize("text", NONE_RAN)
def test_a_test_of_which_no_assertion_ran_has_not_passed(text):
    assert not run_test("def f(x): return []", read_script(text), LIMITS)


PASSES = "def test_a():\n    assert f(2) == 4\n"
REFUSED = {
    "never runs the assertions of test_b": [
        UNITTEST + "def test_a(self): self.assertEqual(f(2), 4)\n    class TestB(unittest.TestCase):\n"
        "        def test_b(self): self.assertEqual(f(2), 4)",
        "class TestA:\n    def __init__(self): self.x = 2\n    def test_b(self): assert f(2) == 4\n" + PASSES,
        "class Helper:\n    def test_b(self): assert f(2) == 4\n" + PASSES,
        "def test_b():\n    assert f(2) == 4\ntest_b.__test__ = False\n" + PASSES,
        "def test_b():\n    assert f(2) == 4\ndel test_b\n" + PASSES,
    ],
    "never runs the assertions of check": ["def check_f(x):\n    assert f(2) == 4\n" + PASSES],
    "which unittest does not await": [
        UNITTEST + "async def test_b(self): assert f(2) == 5\n    def test_a(self): assert f(2) == 4",
        UNITTEST + "def test_b(self):\n        yield\n        assert f(2) == 5\n"
        "    def test_a(self): assert f(2) == 4",
        UNITTEST + "async def setUp(self): assert f(2) == 5\n    def test_a(self): assert f(2) == 4",
    ],
    "callable but not a function": [
        "class Check:\n    def __call__(self): assert f(2) == 5\ntest_b = Check()\n" + PASSES,
        "import operator\ntest_b = operator.methodcaller('x')\n" + PASSES,
    ],
    "defines pytest_generate_tests": ["def pytest_generate_tests(metafunc): pass\n" + PASSES],
    "uses pytest.mark.xfail": ["import pytest\nm = pytest.mark\n@getattr(m, 'xfail')\n" + PASSES],
    "uses request.node": ["def test_a(request):\n    assert request.node and f(2) == 4"],
    "calls a fixture directly": [
        "import pytest\n@pytest.fixture\ndef x(): return 2\ndef test_a(): assert f(x()) == 4"
    ],
    "needs the fixture y": [
        "import pytest\n@pytest.mark.parametrize('x', [2])\ndef test_b(x, y): assert f(x) == 4\n" + PASSES
    ],
    "an autouse fixture": [
        "import pytest\n@pytest.fixture(autouse=True)\ndef x(): assert f(2) == 4\n"
        + UNITTEST + "def test_a(self): assert f(2) == 4"
    ],
    "gives the program a C": ["class C: pass\ndef test_a():\n    assert f(C()) == 4"],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "text"), [(each, text) for each in REFUSED for text in REFUSED[each]])
def test_what_does_not_run_refuses_the_row_and_passes_no_program(reason, text):
    with pytest.raises(ValueError, match=reason):
        run_test("def f(x): return x * x", read_script(text, "f"), LIMITS)
