"""Parse a row's tests from the forms that data sets use, and check outputs and values.

    Python       ["assert f(2) == 4", ...], or one text: asserts, tests for unittest or pytest, or a
                 check(candidate) (script.py)          MBPP, HumanEval, KodCode, BigCodeBench
    input        {"inputs": ["2\\n"], "outputs": ["4\\n"]}                  APPS, TACO, CodeContests
    function     {"fn_name": "f", "inputs": [[2]], "outputs": [4]}        the same
    cases        {"language": "python", "test_cases": [{"type": "stdin_stdout", "fn_name": None,
                 "input": "2\\n", "output": "4\\n"}]}, or the list     verifiable-coding-problems

Each may be JSON in a string. Printed output is correct if it has the expected words, line by line; a number
may be spelled otherwise (4 for 4.0, as in LiveCodeBench). A value is correct if it equals the expected one,
with tuples as lists; as in APPS, a value that equals the only item of an expected list is correct too. A
number that is expected with a fraction or an exponent may differ by 1e-6, or by a part in 1e9 (APPS: by a
part in 1e5); a float may differ from an expected integer by 1e-6.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any, NamedTuple

from qerl.tasks.code.script import Script, read_script
from qerl.tasks.code.values import decode


class InputCase(NamedTuple):
    """InputCase(stdin="2\\n", expected="4\\n")"""

    stdin: str
    expected: str


class CallCase(NamedTuple):
    """CallCase(function="f", arguments=[2], expected=4)"""

    function: str
    arguments: list[Any]
    expected: Any


TestCase = InputCase | CallCase | Script


def parse_tests(tests: Any, entry_point: str | None = None) -> list[TestCase]:
    """Return the row's tests; raise ValueError if there is none that could be run, and could fail."""
    entry_point = entry_point.strip() or None if isinstance(entry_point, str) else None
    try:
        cases = _parse(tests, entry_point)
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"the row's tests have no known form: {str(tests)[:80]}") from error
    if not cases:
        raise ValueError(f"the row has no tests: {str(tests)[:80]}")
    return cases


def _parse(tests: Any, entry_point: str | None) -> list[TestCase]:
    if isinstance(tests, str):
        if tests.lstrip()[:1] in ("[", "{"):
            return _parse(_loaded(tests), entry_point)
        return [read_script(tests, entry_point)] if tests.strip() else []
    if isinstance(tests, dict):
        if str(tests.get("language") or "python").lower() not in ("python", "python3"):
            raise ValueError(f"the row's tests are for {tests['language']}")
        if "test_cases" in tests:
            return _parse(tests["test_cases"], entry_point)
        inputs, expected = (tests.get(f"{name}s", tests.get(name)) or [] for name in ("input", "output"))
        pairs = zip(inputs, expected, strict=True)
        return [_case({"fn_name": tests.get("fn_name"), "input": i, "output": o}) for i, o in pairs]
    if isinstance(tests, list):
        return [read_script(test, entry_point) if isinstance(test, str) else _case(test) for test in tests]
    return []


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the row's tests are neither JSON nor Python: {text[:80]}") from error


def _case(case: dict[str, Any]) -> TestCase:
    arguments, expected, name = case["input"], case["output"], case.get("fn_name")
    if not name:
        if (kind := case.get("type") or case.get("testtype") or "stdin") not in ("stdin", "stdin_stdout"):
            raise ValueError(f"a test of type {kind} has no fn_name")
        return InputCase(_text(arguments), _text(expected))
    if case.get("testtype") == "functional":  # LiveCodeBench: one argument per line
        return CallCase(name, [json.loads(line) for line in arguments.splitlines()], _parse_json(expected))
    arguments = _parse_json(arguments)
    arguments = arguments if isinstance(arguments, list) else [arguments]
    return CallCase(name, arguments, _parse_json(expected))


def _text(lines: str | list[Any]) -> str:
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))


def _parse_json(value: Any) -> Any:
    """Parse a string of JSON; return anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII)
_INTEGER = re.compile(r"[-+]?\d+", re.ASCII)
_MAX_DIGITS = 400
_ABSOLUTE, _RELATIVE = 1e-6, 1e-9


def is_correct_output(printed: str, expected: str) -> bool:
    lines = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    if lines[0] == lines[1]:
        return True
    return len(lines[0]) == len(lines[1]) and all(map(_is_same_line, *lines))


def _is_same_line(words: list[str], expected: list[str]) -> bool:
    return len(words) == len(expected) and all(map(_is_same_word, words, expected))


def _is_same_word(word: str, expected: str) -> bool:
    """True for equal words, and for numbers that are equal or, if a fraction is expected, close."""
    if word == expected:
        return True
    if max(len(word), len(expected)) > _MAX_DIGITS or not (
        _DECIMAL.fullmatch(word) and _DECIMAL.fullmatch(expected)
    ):
        return False
    if _INTEGER.fullmatch(expected):
        return not _INTEGER.fullmatch(word) and Decimal(word) == Decimal(expected)
    is_finite = math.isfinite(float(expected))
    return Decimal(word) == Decimal(expected) or (is_finite and _is_close(float(word), float(expected)))


def _is_close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def is_correct_value(value: Any, expected: Any) -> bool:
    """True if a value, as `values.encode` makes it of the program's, is the expected one. No set or dict is
    built from the program's items, which could make that take hours; an error is for the caller to count."""
    items = expected if isinstance(expected, list) else []
    return _is_equal(value, expected) or (len(items) == 1 and _is_equal(value, items[0]))


def _is_equal(value: Any, expected: Any) -> bool:
    ((kind, content),) = value.items() if isinstance(value, dict) else [(None, value)]
    if isinstance(expected, list):
        items = content if kind == "tuple" else value
        if not isinstance(items, list) or len(items) != len(expected):
            return False
        return all(_is_equal(one, other) for one, other in zip(items, expected, strict=True))
    if isinstance(expected, dict):
        if kind != "dict":
            return False
        by_key, expected = {_json_key(k): v for k, v in content}, {str(k): v for k, v in expected.items()}
        return by_key.keys() == expected.keys() and all(_is_equal(by_key[k], expected[k]) for k in expected)
    if isinstance(value, float) and type(expected) is int:
        return math.isclose(value, expected, rel_tol=0.0, abs_tol=_ABSOLUTE)
    if isinstance(value, float) and type(expected) is float:
        return _is_close(value, expected)
    if kind == "int":
        return type(expected) in (int, float) and int(content, 16) == expected
    return type(value) is type(expected) and value == expected


def _json_key(key: Any) -> str:
    """Return a key as text, because JSON's keys are."""
    parts = key["tuple"] if isinstance(key, dict) and "tuple" in key else [key]
    if any(isinstance(part, list | dict) and "int" not in part for part in parts):
        raise ValueError("the key is neither a scalar nor a tuple of scalars")
    return str(decode(key))
