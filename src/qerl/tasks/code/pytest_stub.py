"""Stand in for pytest in the process of a test: the parts of it that tests of programs use.

pytest itself need not be installed, takes longer to import than a test takes, and writes files. A test that
uses any other part is refused before the run starts (test_script.py).
"""

import contextlib
import inspect
import io
import math
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

NAMES = ("raises", "warns", "approx", "fixture", "mark", "param", "fail", "skip", "main")
FIXTURES = ("candidate", "capsys")
"""Fixtures that a test need not define: the function that entry_point names, and pytest's capsys."""


class Failed(AssertionError):
    """Raised by fail, and by raises and warns where nothing was raised."""


class Skipped(Exception):
    """Raised by skip."""


def fail(reason: str = "", **options: Any) -> None:
    raise Failed(reason)


def skip(reason: str = "", **options: Any) -> None:
    raise Skipped(reason)


def main(*arguments: Any) -> int:
    """Do nothing: the tests run once the module has."""
    return 0


class _Raised:
    """Result of `with raises(...) as raised`: raised.value is the exception."""

    value: Any = None
    type: Any = None

    def match(self, pattern: str) -> bool:
        if not re.search(pattern, str(self.value)):
            raise Failed(f"{pattern!r} is not in {str(self.value)!r}")
        return True


def raises(expected: Any, *call: Any, match: str | None = None, **keywords: Any) -> Any:
    if not call:
        return _raises(expected, match)
    with _raises(expected, match) as raised:
        call[0](*call[1:], **keywords)
    return raised


@contextlib.contextmanager
def _raises(expected: Any, match: str | None) -> Iterator[_Raised]:
    raised = _Raised()
    try:
        yield raised
    except expected as error:
        raised.value, raised.type = error, type(error)
    else:
        raise Failed(f"nothing raised {expected}")
    if match is not None:
        raised.match(match)


@contextlib.contextmanager
def warns(expected: Any = Warning, *, match: str | None = None) -> Iterator[list[Any]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    fitting = [each for each in caught if issubclass(each.category, expected)]
    if not any(match is None or re.search(match, str(each.message)) for each in fitting):
        raise Failed(f"nothing warned of {expected}")


class approx:
    """Equals a number, or a list, tuple or dict of numbers, within a relative and an absolute tolerance."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None):
        self.expected = expected
        self._rel = rel if rel is not None else 0.0 if abs is not None else 1e-6
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, value: object) -> bool:
        return self._is_close(value, self.expected)

    def _is_close(self, value: Any, expected: Any) -> bool:
        if hasattr(expected, "tolist"):  # of NumPy
            value, expected = getattr(value, "tolist", lambda: value)(), expected.tolist()
        if isinstance(expected, dict):
            same = isinstance(value, dict) and value.keys() == expected.keys()
            return same and all(self._is_close(value[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            same = isinstance(value, list | tuple) and len(value) == len(expected)
            return same and all(map(self._is_close, value, expected))
        if type(value) not in (int, float) or isinstance(expected, bool):
            return type(value) is type(expected) and value == expected
        return math.isclose(value, expected, rel_tol=self._rel, abs_tol=self._abs)


class _Mark:
    """mark.parametrize, mark.skip and mark.skipif act; other marks do nothing."""

    @staticmethod
    def parametrize(names: Any, values: Any, **options: Any) -> Callable[[Any], Any]:
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        cases = []
        for value in values:
            value = value.values if isinstance(value, param) else (value,) if len(names) == 1 else value
            cases.append(dict(zip(names, value, strict=True)))
        return lambda test: _marked(test, parameters=[cases, *getattr(test, "parameters", [])])

    @staticmethod
    def skipif(condition: Any = True, **options: Any) -> Callable[[Any], Any]:
        return lambda test: _marked(test, is_skipped=True) if condition else test

    @staticmethod
    def skip(*reason: Any, **options: Any) -> Any:
        mark = lambda test: _marked(test, is_skipped=True)  # noqa: E731
        return mark(reason[0]) if reason and callable(reason[0]) else mark

    def __getattr__(self, name: str) -> Any:
        return lambda *test, **options: test[0] if test and callable(test[0]) else lambda test: test


mark = _Mark()


def _marked(test: Any, **marks: Any) -> Any:
    for name, value in marks.items():
        setattr(test, name, value)
    return test


class param:
    def __init__(self, *values: Any, **options: Any):
        self.values = values


def fixture(function: Any = None, *, autouse: bool = False, **options: Any) -> Any:
    if function is None:
        return lambda function: fixture(function, autouse=autouse)
    return _marked(function, is_fixture=True, is_used_always=autouse)


def cases_of(test: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each case of a parametrized test; none for a skipped one."""
    if not getattr(test, "is_skipped", False):
        for cases in product(*getattr(test, "parameters", [])):
            yield {name: value for case in cases for name, value in case.items()}


def required(function: Any) -> list[str]:
    """Return the parameters of a function that have no default."""
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty and p.name != "self"]


class Fixtures(contextlib.ExitStack):
    """The fixtures of one test, by name; leaving it runs what follows their yield."""

    def __init__(self, known: dict[str, Any]):
        super().__init__()
        self._known, self._made = known, {}
        for name, function in known.items():
            if getattr(function, "is_used_always", False):
                self.value(name)

    def arguments(self, function: Any) -> dict[str, Any]:
        return {name: self.value(name) for name in required(function)}

    def value(self, name: str) -> Any:
        if name not in self._made:
            made = self._known[name]
            if inspect.isgeneratorfunction(made):
                made = self.enter_context(contextlib.contextmanager(made)(**self.arguments(made)))
            elif getattr(made, "is_fixture", False):
                made = made(**self.arguments(made))
            self._made[name] = made
        return self._made[name]


def capsys() -> Iterator[Any]:
    """Yield what pytest's capsys does: readouterr() returns the text since its last call."""
    stdout, sys.stdout = sys.stdout, io.StringIO()

    def readouterr() -> Any:
        text, sys.stdout = sys.stdout.getvalue(), io.StringIO()  # type: ignore[attr-defined]
        return types.SimpleNamespace(out=text, err="")

    try:
        yield types.SimpleNamespace(readouterr=readouterr)
    finally:
        sys.stdout = stdout


def module() -> types.ModuleType:
    """Return a module with the names of pytest that there are."""
    made = types.ModuleType("pytest")
    vars(made).update({name: globals()[name] for name in NAMES})
    return made
