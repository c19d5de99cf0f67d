"""Collect the tests of a module as pytest does; what it would collect otherwise is refused.

    functions      named test..., also a partial or a decorated function; each case of parametrize and of
                   fixtures with params is a test of its own
    classes        named Test..., without __init__, with the classes and bases inside them
    unittest       classes of unittest.TestCase, whatever their name

Two things go beyond pytest: an async test runs in an event loop, and of a generator each check that it yields
is run. tests/tasks/code/test_against_pytest.py compares collected tests and outcomes with pytest's.
"""

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from fixtures import SETUP, Known, closure, fixtures_of, required
from pytest_stub import Fixture, Mark, MarkDecorator, Param, capsys, own_marks, refuse

_UNITTEST_HOOKS = ("setUp", "tearDown", "setUpClass", "tearDownClass")
_PYTEST_HOOKS = ("setup_method", "teardown_method", "setup_class", "teardown_class")


@dataclasses.dataclass(eq=False)
class Test:
    """One test, with the arguments of one case."""

    name: str
    function: Any
    module: types.ModuleType
    owners: tuple[type, ...] = ()
    """Classes around it, the outermost first."""
    marks: list[Mark] = dataclasses.field(default_factory=list)
    known: Known = dataclasses.field(default_factory=dict)
    own_fixtures: list[Fixture] = dataclasses.field(default_factory=list)
    """Those of its class, which are methods."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    params: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id of a fixture."""
    names: list[str] = dataclasses.field(default_factory=list)
    """Fixtures to be made."""
    instance: Any = None
    bound: Any = None

    @property
    def cls(self) -> type | None:
        return self.owners[-1] if self.owners else None


class UnittestClass(NamedTuple):
    name: str
    kind: Any
    names: list[str]
    """Names of its tests."""
    marks: list[Mark]


class ParameterSet(NamedTuple):
    names: tuple[str, ...]
    values: list[Param]
    indirect: set[str]
    """Those of the names whose fixtures get the values."""


def collect(
    module: types.ModuleType, candidate: Any, is_entered: Callable[[Any], bool]
) -> list[Test | UnittestClass]:
    """Return the tests of the module. candidate: value of the fixture of this name. is_entered: True for a
    function that the module itself has called."""
    if not getattr(module, "__test__", True):
        return []
    known = {"capsys": [Fixture(capsys)], "candidate": [Fixture(lambda: candidate)]}
    collector = _Collector(module, known | fixtures_of(module), own_marks(module), is_entered)
    return list(collector.of_owner(module, ()))


class _Collector:
    def __init__(
        self, module: types.ModuleType, known: Known, marks: list[Mark], is_entered: Callable[[Any], bool]
    ):
        self._module, self._known, self._marks, self._is_entered = module, known, marks, is_entered

    def of_owner(self, owner: Any, owners: tuple[type, ...]) -> Iterator[Test | UnittestClass]:
        """Yield the tests of a module or class: those of bases first, each in the order of definition."""
        seen: set[str] = set()
        tests_by_scope: list[list[Test | UnittestClass]] = []
        for scope in [kind.__dict__ for kind in owner.__mro__] if owners else [vars(owner)]:
            new = [(name, value) for name, value in list(scope.items()) if name not in seen]
            seen |= scope.keys()
            tests_by_scope.append([test for name, value in new for test in self._tests(name, value, owners)])
        for tests in reversed(tests_by_scope):
            yield from tests

    def _tests(self, name: str, value: Any, owners: tuple[type, ...]) -> Iterator[Test | UnittestClass]:
        if name.startswith("pytest_"):
            refuse(f"defines {name}")
        if type(value).__module__ == "remote_value" or name in dir(object):
            return  # what the program defines is not a test
        is_chosen = getattr(value, "__test__", None) is True
        if inspect.isclass(value):
            yield from self._of_class(name, value, owners, is_chosen)
        elif (name.startswith("test") or is_chosen) and not isinstance(value, Fixture):
            yield from self._of_function(name, value, owners)

    def _of_class(
        self, name: str, kind: Any, owners: tuple[type, ...], is_chosen: bool
    ) -> Iterator[Test | UnittestClass]:
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(kind, unittest.TestCase):
            if getattr(kind, "__test__", True) and kind.__module__ == "__main__":
                yield self._of_unittest("::".join([*(each.__name__ for each in owners), name]), kind)
            return
        has_init = kind.__init__ is not object.__init__ or kind.__new__ is not object.__new__
        is_named = name.startswith("Test") or is_chosen
        if not is_named or has_init or inspect.isabstract(kind) or not getattr(kind, "__test__", True):
            return
        if kind.__module__ != "__main__":
            refuse(f"imports the tests {name}")
        if owners and any(made.autouse for chain in fixtures_of(owners[-1]).values() for made in chain):
            refuse(f"has the class {name} in one with setup functions")
        yield from self.of_owner(kind, (*owners, kind))

    def _of_unittest(self, name: str, kind: Any) -> UnittestClass:
        import unittest

        names = unittest.TestLoader().getTestCaseNames(kind)
        names = [each for each in names if getattr(getattr(kind, each), "__test__", True)]
        if not names and getattr(kind, "runTest", None) is not None:
            names = ["runTest"]
        fixtures = (chain for each, chain in self._known.items() if SETUP not in each)
        if any(made.autouse for chain in fixtures for made in chain):
            refuse(f"has an autouse fixture and the class {name} of unittest")
        if getattr(kind, "__unittest_expecting_failure__", False):
            refuse(f"has {name}, which is expected to fail")
        case = sys.modules.get("unittest.async_case")  # naming it in unittest would import asyncio: 50 ms
        is_async = case is not None and issubclass(kind, case.IsolatedAsyncioTestCase)
        for each in dir(kind):
            _check_member(name, each, inspect.getattr_static(kind, each), each in names, is_async)
        marks = [mark for base in kind.__mro__ for mark in own_marks(base)]
        if any(mark.name in ("parametrize", "usefixtures") for mark in marks):
            refuse(f"has {name} with a mark of pytest that unittest does not know")
        return UnittestClass(name, kind, names, [*marks, *self._marks])

    def _of_function(self, name: str, value: Any, owners: tuple[type, ...]) -> Iterator[Test]:
        function = getattr(value, "__func__", value)
        if not callable(function):
            return
        plain = real(function)
        if not inspect.isfunction(plain):
            refuse(f"has {name}, which is callable but not a function")
        if not getattr(function, "__test__", True):
            return
        is_bound = isinstance(value, staticmethod | classmethod)
        if isinstance(function, functools.partial) and owners and not is_bound:
            refuse(f"has {name}, a partial in a class")
        if plain.__module__ != "__main__":
            refuse(f"has the test {name} of the module {plain.__module__}")
        yield from self._cases("::".join([*(each.__name__ for each in owners), name]), function, owners)

    def _cases(self, name: str, function: Any, owners: tuple[type, ...]) -> Iterator[Test]:
        """Yield a test for each case of its parameters and of those of its fixtures."""
        of_class = fixtures_of(owners[-1]) if owners else {}
        known = self._known | {each: [*self._known.get(each, ()), *made] for each, made in of_class.items()}
        of_owners = [mark for kind in reversed(owners) for base in kind.__mro__ for mark in own_marks(base)]
        marks = [*own_marks(function), *of_owners, *self._marks]
        sets = [_parameter_set(mark) for mark in marks if mark.name == "parametrize"]
        parameters = [each for one in sets for each in one.names]
        direct = {each for one in sets for each in one.names if each not in one.indirect}
        used = [each for mark in marks if mark.name == "usefixtures" for each in mark.arguments]
        names = closure(known, [*used, *_needed(function, owners, name)], direct)
        if missing := [each for each in names if each not in known.keys() | direct | {"request"}]:
            if not marks and self._is_entered(function):
                return  # a function that the test's own code has called
            refuse(f"has {name}, which needs the fixture {missing[0]}")
        if len(parameters) != len({*parameters}) or not {*parameters} <= {*names}:
            refuse(f"has {name} with parameters that it does not take, or takes twice")
        order = [each for each in names if each not in direct]
        sets = [*_fixture_params(known, order, {*parameters}), *sets]
        if sets and isinstance(function, functools.partial):
            refuse(f"has {name}, a partial with parameters")
        of_kind = [made for each, chain in of_class.items() if SETUP not in each for made in chain]
        test = Test(name, function, self._module, owners, known=known, own_fixtures=of_kind, names=order)
        for case in product(*(one.values for one in sets)):
            more = [mark for values in case for mark in values.marks]
            yield _with_case(
                dataclasses.replace(test, marks=[*more, *marks], arguments={}, params={}), sets, case
            )


def _with_case(test: Test, sets: list[ParameterSet], case: tuple[Param, ...]) -> Test:
    for one, values in zip(sets, case, strict=True):
        for name, value in zip(one.names, values.values, strict=True):
            if name in one.indirect:
                test.params[id(test.known[name][-1])] = value
            else:
                test.arguments[name] = value
    return test


def _check_member(owner: str, name: str, value: Any, is_test: bool, is_async: bool) -> None:
    """Refuse a member of a unittest class that unittest or pytest alone would run, or that is not awaited."""
    function = real(getattr(value, "__func__", value))
    is_hook = name in _UNITTEST_HOOKS
    is_lazy = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    is_lazy |= inspect.iscoroutinefunction(function) and (is_hook or not is_async)
    if (is_test or is_hook) and is_lazy:
        refuse(f"has {owner}.{name}, which unittest does not await")
    if isinstance(value, Fixture) or (name in _PYTEST_HOOKS and value is not None):
        refuse(f"has {owner}.{name}, which is pytest's, in a class of unittest")
    if is_test and any(
        mark.name in ("skip", "skipif", "parametrize", "usefixtures") for mark in own_marks(function)
    ):
        refuse(f"has {owner}.{name} with a mark of pytest in a class of unittest")
    if getattr(function, "__unittest_expecting_failure__", False):
        refuse(f"has {owner}.{name}, which is expected to fail")


def _needed(function: Any, owners: tuple[type, ...], name: str) -> list[str]:
    """Return the parameters of a test, without the object of a method."""
    is_plain = not owners or isinstance(
        inspect.getattr_static(owners[-1], name.rpartition("::")[2]), staticmethod
    )
    return required(function)[0 if is_plain else 1 :]


def _fixture_params(known: Known, names: list[str], parameters: set[str]) -> list[ParameterSet]:
    """Return the params of fixtures that parametrize has set none; refuse those of wider scopes, for
    which pytest changes the order of tests."""
    sets = []
    for name in names:
        chain = known.get(name, [])
        made = chain[-1] if chain else None
        if len(chain) > 1 and (name in parameters or any(each.params is not None for each in chain)):
            refuse(f"has params of the fixture {name}, which another one replaces")
        if made is not None and (made.params is not None or name in parameters) and made.scope != "function":
            refuse(f"has the fixture {name} with params and scope {made.scope}")
        if made is not None and made.params is not None and name not in parameters:
            values = [_as_param(each, is_single=True) for each in made.params]
            sets.append(ParameterSet((name,), values or _skipped(1), {name}))
    return sets


def _parameter_set(mark: Mark) -> ParameterSet:
    def parametrize(
        argnames: Any, argvalues: Any, indirect: Any = False, ids: Any = None, scope: Any = None
    ) -> ParameterSet:
        if scope not in (None, "function"):
            refuse(f"uses parametrize with scope {scope}")
        split = [each.strip() for each in argnames.split(",")] if isinstance(argnames, str) else argnames
        names = tuple(filter(None, split))
        is_single = len(names) == 1 and isinstance(argnames, str)
        values = [_as_param(value, is_single=is_single) for value in argvalues]
        if any(len(value.values) != len(names) for value in values):
            refuse(f"uses parametrize with another number of values than names: {argnames}")
        chosen = {*names} if indirect is True else {*(indirect or ())}
        return ParameterSet(names, values or _skipped(len(names)), chosen)

    try:
        return parametrize(*mark.arguments, **mark.options)
    except TypeError as error:
        refuse(f"uses parametrize wrongly: {error}")


def _as_param(value: Any, *, is_single: bool) -> Param:
    if isinstance(value, Param):
        return value
    return Param((value,) if is_single else tuple(value), ())


def _skipped(num_names: int) -> list[Param]:
    """Return the one case, which is skipped, of parameters without values."""
    return [Param((None,) * num_names, MarkDecorator(Mark("skip", (), {})))]


def real(function: Any) -> Any:
    """Return the function below decorators and partials."""
    while True:
        inner = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if inner is None:
            return function
        function = inner
