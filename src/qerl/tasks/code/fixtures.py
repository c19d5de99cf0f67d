"""Set up and tear down the fixtures of a test, and the setup functions around it, in pytest's order.

    closure     the names that a test needs: autouse, usefixtures, its parameters, and what these need;
                wider scopes first
    setup       setUpModule or setup_module, setup_function, setup_class and setup_method are autouse
                fixtures, too
    scopes      a fixture of a module or class is made once, for the first test that needs it; for a
                function outside of classes, scope class is scope function

What pytest would do in another order is refused: params of a fixture wider than a function, and a fixture
that needs a narrower one.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pytest_stub import SCOPES, Fixture, refuse

_ASYNC = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_SETUPS = {
    "module": (("setUpModule", "setup_module"), ("tearDownModule", "teardown_module")),
    "function": (("setup_function",), ("teardown_function",)),
    "class": (("setup_class",), ("teardown_class",)),
    "method": (("setup_method",), ("teardown_method",)),
}
SETUP = " setup of "
"""In the names of fixtures that are setup functions."""
Known = dict[str, list[Fixture]]
"""The fixtures of each name, the innermost last."""


def required(function: Any) -> list[str]:
    """Return the parameters of a function that have no default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        refuse(f"has a test without a signature, {function!r:.60}")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in named if p.default is p.empty]


@functools.cache
def fixtures_of(owner: Any) -> Known:
    """Return the fixtures of a module or class, in pytest's order: setup functions, then by name."""
    fixtures: Known = {}
    for level in ("class", "method") if inspect.isclass(owner) else ("module", "function"):
        before, after = (_first(owner, names) for names in _SETUPS[level])
        if before or after:
            scope = "function" if level == "method" else level
            made = Fixture(_setup(level, owner, before, after), scope, autouse=True)
            fixtures[f"{level}{SETUP}{getattr(owner, '__qualname__', '')}"] = [made]
    for name in dir(owner):
        made = inspect.getattr_static(owner, name)
        if isinstance(made, Fixture):
            _check_plain(made.function, f"the fixture {name}")
            fixtures[made.name or name] = [made]
    return fixtures


def _check_plain(function: Any, what: str) -> None:
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function) or any(is_async(function) for is_async in _ASYNC):
        refuse(f"has {what}, which is no plain function")


def _first(owner: Any, names: Iterable[str]) -> str | None:
    for name in names:
        value = getattr(owner, name, None)
        if value is not None and not isinstance(value, Fixture):
            _check_plain(value, name)
            return name
    return None


def _setup(level: str, owner: Any, before: str | None, after: str | None) -> Callable[..., Iterator[None]]:
    """Return the fixture function that calls a setup function, and its teardown function after the yield."""
    fixed = {name: getattr(owner, name) for name in (before, after) if name}
    fixed = {name: getattr(value, "__func__", value) for name, value in fixed.items()}

    def call(name: str | None, request: "Request") -> None:
        if name and not (level == "function" and request.instance is not None):
            function = getattr(request.instance, name) if level == "method" else fixed[name]
            subject = {"module": owner, "class": request.cls}.get(level, request.function)
            plain = getattr(function, "__func__", function)
            takes_subject = plain.__code__.co_argcount > inspect.ismethod(function)
            function(*[subject][:takes_subject])

    def run(request: "Request") -> Iterator[None]:
        call(before, request)
        yield
        call(after, request)

    return run


class Request:
    """pytest's fixture `request`, for one fixture of one test."""

    def __init__(self, session: "FixtureSession", test: Any, made: Fixture | None):
        self._session, self._test = session, test
        self.cls, self.instance, self.function = test.cls, test.instance, test.bound
        self.module, self.scope = test.module, made.scope if made else "function"
        if made is not None and id(made) in test.params:
            self.param = test.params[id(made)]

    def addfinalizer(self, finalizer: Callable[[], Any]) -> None:
        self._session.stack(self.scope).callback(finalizer)

    def getfixturevalue(self, name: str) -> Any:
        if name not in self._test.names:
            refuse(f"calls request.getfixturevalue for {name}, which it does not name as a parameter")
        return self._session.value(self._test, name)

    def __getattr__(self, name: str) -> Any:
        if name == "param" or name.startswith("__"):
            raise AttributeError(name)
        refuse(f"uses request.{name}")


class FixtureSession:
    """The fixtures that exist now."""

    def __init__(self):
        self._stacks = {scope: contextlib.ExitStack() for scope in SCOPES}
        self._values: dict[str, dict[int, tuple[Any, Exception | None]]] = {scope: {} for scope in SCOPES}
        """By id of a fixture: its value, or the error that it raised, which it raises for each test."""

    def stack(self, scope: str) -> contextlib.ExitStack:
        return self._stacks[scope]

    def close(self, scope: str) -> None:
        """Tear down the fixtures of this scope; raise the last error of theirs."""
        stack, self._stacks[scope] = self._stacks[scope], contextlib.ExitStack()
        self._values[scope] = {}
        stack.close()

    def value(self, test: Any, name: str, inside: Fixture | None = None) -> Any:
        """Return a fixture's value for the test; inside: the fixture of this name that asks for the one that
        it replaces."""
        if name in test.arguments:
            return test.arguments[name]
        if name == "request":
            return Request(self, test, inside)
        chain = test.known.get(name, [])
        chain = chain[: chain.index(inside)] if inside in chain else chain
        if not chain:
            refuse(f"needs the fixture {name}")
        made = chain[-1]
        values = self._values[made.scope]
        if id(made) not in values:
            try:
                values[id(made)] = self._made(test, made), None
            except Exception as error:
                values[id(made)] = None, error
        value, error = values[id(made)]
        if error is not None:
            raise error
        return value

    def _made(self, test: Any, made: Fixture) -> Any:
        function = made.function
        if made in test.own_fixtures:
            function = function.__get__(test.instance, type(test.instance))
        arguments = {}
        for name in required(function):
            self._check_scope(test, made, name)
            is_same = name == "request" or made in test.known.get(name, [])
            arguments[name] = self.value(test, name, made if is_same else None)
        if not inspect.isgeneratorfunction(getattr(function, "__func__", function)):
            return function(**arguments)
        steps = function(**arguments)
        value = next(steps)
        self.stack(made.scope).callback(_finish, steps)
        return value

    def _check_scope(self, test: Any, made: Fixture, name: str) -> None:
        chain = test.known.get(name, [])
        needed = "function" if name in test.arguments or not chain else chain[-1].scope
        if name != "request" and SCOPES.index(needed) > SCOPES.index(made.scope):
            refuse(f"has a fixture of scope {made.scope} that needs {name}, of scope {needed}")


def _finish(steps: Any) -> None:
    """Run what follows the yield of a fixture."""
    for _ in steps:
        raise ValueError("the fixture yields more than once")


def closure(known: Known, names: Iterable[str], parameters: Iterable[str]) -> list[str]:
    """Return these names and those that their fixtures need, wider scopes first; parameters: names for
    which no fixture is made."""
    waiting = [*(name for name, chain in known.items() if chain[-1].autouse), *names]
    fixtures: list[str] = []
    while waiting:
        name = waiting.pop(0)
        if name not in fixtures:
            fixtures.append(name)
            made = known.get(name, []) if name not in parameters else []
            needed = [each for one in made for each in required(one.function)]
            waiting += [each for each in needed if each not in ("self", "cls")]
    made = {name: known[name][-1] for name in fixtures if name in known and name not in parameters}
    return sorted(fixtures, key=lambda name: SCOPES.index(made[name].scope if name in made else "function"))
