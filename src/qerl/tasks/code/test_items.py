"""Run the tests that collect.py has found, each with its fixtures, and say how each ended."""

import inspect
import os
import platform
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from collect import Test, UnittestClass
from fixtures import FixtureSession, fixtures_of, required
from pytest_stub import Mark, Skipped

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_MODULE_HOOKS = ("setUpModule", "tearDownModule")


class TestOutcome(NamedTuple):
    name: str
    result: str
    not_run: Any = None
    """The function or class that was skipped."""


def run(tests: list[Test | UnittestClass], module: types.ModuleType) -> Iterator[TestOutcome]:
    """Run the tests and yield their outcomes; a teardown of a class or module that fails is one too."""
    session, kind = FixtureSession(), None
    for test in tests:
        test_class = None if isinstance(test, UnittestClass) else test.cls
        if test_class is not kind:
            yield from _closed(session, "class")
        kind = test_class
        if isinstance(test, UnittestClass):
            yield from _run_unittest(test, module, session)
        else:
            yield _run_test(test, session)
        if test_class is None:
            yield from _closed(session, "class")
    for scope in ("class", "module", "package", "session"):
        yield from _closed(session, scope)


def _closed(session: FixtureSession, scope: str) -> Iterator[TestOutcome]:
    try:
        session.close(scope)
    except Exception:
        yield TestOutcome(f"teardown of the {scope}", FAILED)


def _is_skipped(marks: list[Mark], module: types.ModuleType) -> bool:
    for mark in marks:
        conditions = mark.arguments if mark.name == "skipif" else ()
        if mark.name == "skipif" and "condition" in mark.options:
            conditions = (mark.options["condition"],)
        scope = {"os": os, "sys": sys, "platform": platform, **vars(module)}
        if mark.name == "skip" or any(eval(c, scope) if isinstance(c, str) else c for c in conditions):
            return True
    return False


def _run_test(test: Test, session: FixtureSession) -> TestOutcome:
    result = PASSED
    try:
        if _is_skipped(test.marks, test.module):
            return TestOutcome(test.name, SKIPPED, test.function)
        test.bound = test.function
        if test.cls is not None:
            test.instance = test.cls()
            test.bound = getattr(test.instance, test.name.rpartition("::")[2])
        for name in test.names:
            session.value(test, name)
        _finish(test.bound(**{name: session.value(test, name) for name in required(test.bound)}))
    except (Exception, SystemExit) as error:
        result = SKIPPED if _is_skip(error) else FAILED
    try:
        session.close("function")
    except Exception:
        result = FAILED
    return TestOutcome(test.name, result, test.function if result == SKIPPED else None)


def _is_skip(error: BaseException) -> bool:
    unittest = sys.modules.get("unittest")
    return isinstance(error, Skipped) or (unittest is not None and isinstance(error, unittest.SkipTest))


def _run_unittest(
    tests: UnittestClass, module: types.ModuleType, session: FixtureSession
) -> Iterator[TestOutcome]:
    """Run the class by unittest, but the module's setup function as pytest does: once for all tests."""
    import unittest

    if _is_skipped(tests.marks, module):
        yield from (TestOutcome(f"{tests.name}::{name}", SKIPPED, tests.kind) for name in tests.names)
        return
    result = unittest.TestResult()
    holder = Test(tests.name, None, module, known=fixtures_of(module))
    hidden = {name: vars(module)[name] for name in _MODULE_HOOKS if name in vars(module)}
    try:
        for name, chain in holder.known.items():
            if chain[-1].autouse and chain[-1].scope == "module":
                session.value(holder, name)
        for name in hidden:
            del vars(module)[name]
        unittest.TestSuite(map(tests.kind, tests.names)).run(result)
    except Exception as error:
        ending = SKIPPED if _is_skip(error) else FAILED
        yield from (
            TestOutcome(f"{tests.name}::{name}", ending, getattr(tests.kind, name)) for name in tests.names
        )
        return
    finally:
        vars(module).update(hidden)
    bad = {_method(test) for test, _ in [*result.errors, *result.failures]}
    bad |= {_method(test) for test in result.unexpectedSuccesses}
    skipped = {_method(test) for test, _ in result.skipped}
    has_begun = result.testsRun > 0 or not bad
    for name in tests.names:
        outcome = FAILED if name in bad or not has_begun else SKIPPED if name in skipped else PASSED
        is_whole = getattr(tests.kind, "__unittest_skip__", False)
        not_run = (tests.kind if is_whole else getattr(tests.kind, name)) if outcome == SKIPPED else None
        yield TestOutcome(f"{tests.name}::{name}", outcome, not_run)
    if has_begun and bad - {*tests.names}:
        yield TestOutcome("teardown of the class", FAILED)


def _method(test: Any) -> str:
    test = getattr(test, "test_case", test)  # of a subTest
    return getattr(test, "_testMethodName", "")


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
