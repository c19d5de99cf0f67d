"""Run a test in a process of its own, which the program cannot reach, and say if it passed.

A text of tests is a module: it runs under the name __main__, then its tests in pytest's manner
(test_items.py). It has passed if nothing failed, the program's process was there to the end, at least one
assertion of the text ran (assertions.py), and each function with assertions that had to be entered was. If
one was not, or if the text does what is not supported, its row is refused: the verdict would say nothing.

This file and those that it imports import the standard library only.
"""

import ast
import importlib
import inspect
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest_stub
import test_items
from assertions import CHECKED, CONTEXT, ENTERED, FAILED, RAN, Instrument
from collect import collect, real
from remote_value import Connection, RemoteValue


class _Assertions:
    """Counts of the assertions that ran and that failed, and lines of the functions that were entered;
    `names` are what the rewritten test calls."""

    def __init__(self):
        self.num_passed = self.num_failed = 0
        self.entered: set[int] = set()
        self.skipped: set[int] = set()
        self.names = {RAN: self.ran, FAILED: self.failed, CHECKED: self.checked, CONTEXT: self.context}
        self.names |= {ENTERED: self.entered.add}

    def ran(self) -> None:
        self.num_passed += 1

    def failed(self) -> None:
        self.num_failed += 1

    def checked(self, function: Any) -> Any:
        if isinstance(function, RemoteValue):
            return function

        def call(*arguments: Any, **keywords: Any) -> Any:
            value = self._noted(lambda: function(*arguments, **keywords))
            self.ran()
            return value

        return call

    def context(self, manager: Any) -> Any:
        return manager if isinstance(manager, RemoteValue) else _Context(manager, self)

    def missed(self, instrument: Instrument) -> list[str]:
        """Return what should have been entered, and was neither entered nor skipped."""
        never = instrument.functions.keys() - self.entered - self.skipped
        return [f"never runs the assertions of {instrument.functions[line]}" for line in sorted(never)]

    def _noted(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except AssertionError:
            self.failed()
            raise


class _Context:
    """A context manager such as assertRaises, whose end is an assertion that ran."""

    def __init__(self, manager: Any, assertions: _Assertions):
        self._manager, self._assertions = manager, assertions

    def __enter__(self) -> Any:
        return self._manager.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        is_done = self._assertions._noted(lambda: self._manager.__exit__(kind, error, trace))
        if is_done or kind is None:
            self._assertions.ran()
        return is_done


def run_test(test: dict[str, Any], stream: Any) -> str:
    """Run {"text", "names", "imports", "candidate"} (script.py); return "passed", "failed", or "refused " and
    what it does that is not supported."""
    connection, assertions = Connection(stream), _Assertions()
    warnings.showwarning = lambda *arguments, **options: None  # as in pytest, stderr gets no warnings
    missed: list[str] = []
    try:
        missed = _run(test, connection, assertions)
    except BaseException:
        assertions.failed()
    if connection.refused is not None:
        return f"refused gives the program a {connection.refused} of its own"
    if pytest_stub.refusals:
        return f"refused {pytest_stub.refusals[0]}"
    if assertions.num_passed == 0 or assertions.num_failed or connection.has_ended:
        return "failed"
    return f"refused {missed[0]}" if missed else "passed"


def _run(test: dict[str, Any], connection: Connection, assertions: _Assertions) -> list[str]:
    """Run the test until something fails; return what it never ran."""
    module = types.ModuleType("__main__")
    names = vars(module)
    names |= {"math": math, **assertions.names}
    sys.modules |= {"__main__": module, "solution": _Solution(connection), "pytest": pytest_stub.module()}
    for name, path in test["imports"].items():
        names[name] = _imported(path)
    for name in test["names"]:
        if name in connection.names:
            names[name] = connection.value(name)
    if test["candidate"] is not None:
        names["candidate"] = _candidate(test["candidate"], connection)
    tree = ast.parse(test["text"])
    instrument = Instrument(tree, test["names"])
    _run_module(compile(instrument.visit(tree), "test.py", "exec"), names)
    for outcome in run_items(module, assertions):
        if outcome.result == test_items.FAILED:
            raise AssertionError(outcome.name)
    return assertions.missed(instrument)


def run_items(module: types.ModuleType, assertions: _Assertions) -> Iterator[test_items.TestOutcome]:
    """Run the tests of a module that has run, and yield their outcomes."""
    is_entered = lambda function: not assertions.entered.isdisjoint(_lines(function))  # noqa: E731
    for outcome in test_items.run(collect(module, vars(module).get("candidate"), is_entered), module):
        assertions.skipped.update(_lines(outcome.not_run))
        yield outcome


def _lines(value: Any) -> list[int]:
    """Return the first lines of the functions in a function or class."""
    if inspect.isclass(value):
        return [line for member in vars(value).values() for line in _lines(member)]
    value = real(getattr(value, "__func__", value))
    codes = [value.__code__] if isinstance(value, types.FunctionType) else []
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return [code.co_firstlineno for code in codes]


class _Solution(types.ModuleType):
    """The module `solution`, from which tests import the program's names."""

    def __init__(self, connection: Connection):
        super().__init__("solution")
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._connection.names:
            raise AttributeError(name)
        return self._connection.value(name)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name) if name else importlib.import_module(module)


def _candidate(expression: str, connection: Connection) -> Any:
    """Return the value of an expression such as `f` or `Solution().f`; of none, the only function."""
    if not expression:
        (expression,) = connection.functions
    used = {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}
    return eval(expression, {name: connection.value(name) for name in used})


def _run_module(code: types.CodeType, names: dict[str, Any]) -> None:
    if "unittest" in code.co_names:
        import unittest

        unittest.main = lambda *arguments, **options: None
    try:
        exec(code, names)
    except SystemExit as end:
        if end.code:
            raise
    except pytest_stub.Skipped:
        pytest_stub.refuse("skips the whole module")
