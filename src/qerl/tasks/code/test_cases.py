"""The tests of a row, in the forms that data sets have them.

    asserts      ["assert f(2) == 4", ...], or one text: asserts, test_ functions, or a check(candidate) for
                 the function that the column entry_point names           MBPP, HumanEval, KodCode
    input        {"inputs": ["2\\n"], "outputs": ["4\\n"]}                  APPS, TACO, CodeContests
    function     {"fn_name": "f", "inputs": [[2]], "outputs": [4]}        the same
    cases        {"language": "python", "test_cases": [{"type": "stdin_stdout", "fn_name": None,
                 "input": "2\\n", "output": "4\\n"}]}, or the list     verifiable-coding-problems

Any of them may be JSON in a string. What is printed is right if it has the words of what is expected, line by
line. A value is right if it is equal, a tuple being a list and floats within 1e-6; as in APPS, the one item
of a list of one is right too.
"""

import dataclasses
import json
import math
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class InputCase:
    """InputCase(given="2\\n", expected="4\\n")"""

    given: str
    expected: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallCase:
    """CallCase(function="f", given=[2], expected=4)"""

    function: str
    given: list[Any]
    expected: Any


@dataclasses.dataclass(frozen=True, slots=True)
class AssertCase:
    """AssertCase(text="assert f(2) == 4")"""

    text: str


Case = InputCase | CallCase | AssertCase


def cases_of(tests: Any, entry_point: str | None = None) -> list[Case]:
    """ValueError for what holds no test: every sample would be wrong."""
    cases = _cases(tests, entry_point)
    if not cases:
        raise ValueError(f"the row holds no tests: {str(tests)[:80]}")
    return cases


def _cases(tests: Any, entry_point: str | None) -> list[Case]:
    if isinstance(tests, str):
        if tests.lstrip()[:1] in ("[", "{"):
            return _cases(json.loads(tests), entry_point)
        return [AssertCase(_checking(tests, entry_point))] if tests.strip() else []
    if isinstance(tests, dict):
        if str(tests.get("language") or "python").lower() not in ("python", "python3"):
            raise ValueError(f"the row's tests are for {tests['language']}")
        if "test_cases" in tests:
            return _cases(tests["test_cases"], entry_point)
        given, expected = (tests.get(f"{name}s", tests.get(name)) or [] for name in ("input", "output"))
        pairs = zip(given, expected, strict=True)
        return [_case({"fn_name": tests.get("fn_name"), "input": i, "output": o}) for i, o in pairs]
    if isinstance(tests, list):
        return [AssertCase(test) if isinstance(test, str) else _case(test) for test in tests]
    return []


def _checking(test: str, entry_point: str | None) -> str:
    return f"{test}\n\ncheck({entry_point})\n" if entry_point and "def check(" in test else test


def _case(case: dict[str, Any]) -> Case:
    given, expected, name = case["input"], case["output"], case.get("fn_name")
    if not name:
        if (kind := case.get("type") or case.get("testtype") or "stdin") not in ("stdin", "stdin_stdout"):
            raise ValueError(f"a test of type {kind} names no function")
        return InputCase(_text(given), _text(expected))
    if case.get("testtype") == "functional":  # LiveCodeBench: an argument a line
        return CallCase(name, [json.loads(line) for line in given.splitlines()], _plain(expected))
    given = _plain(given)
    return CallCase(name, given if isinstance(given, list) else [given], _plain(expected))


def _text(lines: str | list[Any]) -> str:
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))


def _plain(value: Any) -> Any:
    """The value that a string of JSON holds."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def is_right_output(printed: str, expected: str) -> bool:
    return _words(printed) == _words(expected)


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def is_right_value(value: Any, expected: Any) -> bool:
    return _is_equal(value, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _is_equal(value, expected[0])
    )


def _is_equal(value: Any, expected: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(expected, list):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_is_equal(one, other) for one, other in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):  # JSON's keys are strings
        value = {str(key): item for key, item in value.items()}
        expected = {str(key): item for key, item in expected.items()}
        return value.keys() == expected.keys() and all(_is_equal(value[k], expected[k]) for k in value)
    if isinstance(value, float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
    return type(value) is type(expected) and value == expected
