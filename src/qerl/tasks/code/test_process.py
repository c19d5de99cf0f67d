"""Run a test in a process of its own, which the program cannot reach, and say if it passed.

A text of tests is a module: it runs under the name __main__, then its unittest.TestCase classes, its
functions and its classes named like tests, in pytest's manner. It has passed if nothing failed, the program's
process was there to the end, and at least one assertion of the text ran (assertions.py).

This file and those that it imports import the standard library only.
"""

import ast
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest_stub
from assertions import CHECKED, CONTEXT, FAILED, RAN, Instrument
from remote_value import Connection, RemoteValue


class _Assertions:
    """Counts of the assertions that ran and that failed; `names` are what the rewritten test calls."""

    def __init__(self):
        self.num_passed = self.num_failed = 0
        self.names = {RAN: self.ran, FAILED: self.failed, CHECKED: self.checked, CONTEXT: self.context}

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
    the type of an object that the test cannot pass to the program."""
    connection, assertions = Connection(stream), _Assertions()
    try:
        _run(test, connection, assertions)
    except BaseException:
        assertions.failed()
    if connection.refused is not None:
        return f"refused {connection.refused}"
    is_passed = assertions.num_passed > 0 and assertions.num_failed == 0 and not connection.has_ended
    return "passed" if is_passed else "failed"


def _run(test: dict[str, Any], connection: Connection, assertions: _Assertions) -> None:
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
    _run_module(compile(Instrument(tree, test["names"]).visit(tree), "test.py", "exec"), names)
    _run_tests(module)


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


def _run_tests(module: types.ModuleType) -> None:
    fixtures = {name: value for name, value in vars(module).items() if _is_fixture(value)}
    known = {name: value for name, value in vars(module).items() if name in pytest_stub.FIXTURES}
    known |= {"capsys": pytest_stub.capsys, **fixtures}
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != "__main__" or name in fixtures:
            continue
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            _run_function(value, known)
        elif isinstance(value, type) and _is_unittest(value):
            _run_unittest(value)
        elif isinstance(value, type) and name.startswith("Test"):
            _run_class(value, known)


def _is_fixture(value: Any) -> bool:
    return getattr(value, "is_fixture", False) is True


def _is_unittest(kind: type) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and issubclass(kind, unittest.TestCase)


def _run_unittest(kind: Any) -> None:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(kind).run(result)
    if not result.wasSuccessful() or result.expectedFailures:
        raise AssertionError(f"{kind.__name__} failed")


def _run_class(kind: type, known: dict[str, Any]) -> None:
    """Run the methods named like tests, each on an object of its own."""
    _call(kind, "setup_class")
    for name in (name for name in dir(kind) if name.startswith("test")):
        tested = kind()
        methods = {each: getattr(tested, each) for each in dir(kind) if not each.startswith("__")}
        fixtures = {each: method for each, method in methods.items() if _is_fixture(method)}
        _call(tested, "setup_method", methods[name])
        _run_function(methods[name], known | fixtures)
        _call(tested, "teardown_method", methods[name])
    _call(kind, "teardown_class")


def _call(owner: Any, name: str, *arguments: Any) -> None:
    """Call a method if there is one, with as many of the arguments as it takes."""
    if (method := getattr(owner, name, None)) is not None:
        method(*arguments[: len(inspect.signature(method).parameters)])


def _run_function(test: Any, known: dict[str, Any]) -> None:
    for case in pytest_stub.cases_of(test):
        if not {*pytest_stub.required(test)} <= (known | case).keys():
            return  # a function that the test's own code calls
        try:
            with pytest_stub.Fixtures(known | case) as fixtures:
                _finish(test(**fixtures.arguments(test)))
        except pytest_stub.Skipped:
            continue


def _finish(result: Any) -> None:
    """Run what a test function returned: a coroutine, or a generator of the checks that it yields."""
    if inspect.iscoroutine(result) or inspect.isasyncgen(result):
        import asyncio  # takes longer than most tests

        asyncio.run(result if inspect.iscoroutine(result) else _drained(result))
    elif isinstance(result, Iterator):
        for check, *arguments in map(_check_of, result):
            _finish(check(*arguments))


async def _drained(results: Any) -> None:
    async for _ in results:
        pass


def _check_of(yielded: Any) -> tuple[Any, ...]:
    """Return what a generator test yielded as (function, arguments...); of anything else, one that passes."""
    parts = yielded if isinstance(yielded, tuple) else (yielded,)
    return parts if parts and callable(parts[0]) else (lambda: None,)
