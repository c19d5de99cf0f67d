"""Stand in for pytest in the process of a test: the parts of it that tests of programs use.

pytest itself need not be installed, takes longer to import than a test takes, and writes files. A test that
uses another part is refused, before the run starts if its text shows it (script.py), else when it runs.
"""

import dataclasses
import inspect
import io
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, cast

import pytest_names
from approximate import approx as approx

SCOPES = ("session", "package", "module", "class", "function")
refusals: list[str] = []
"""Unsupported uses by the test, those whose exception it caught included."""


class Refused(BaseException):
    """Raised by what would make the verdict differ from pytest's."""


def refuse(what: str) -> NoReturn:
    """Refuse the row: "uses pytest.mark.xfail"."""
    refusals.append(what)
    raise Refused(what)


class Failed(AssertionError):
    """Raised by fail, and by raises and warns where nothing was raised."""


class Skipped(Exception):
    """Raised by skip."""


def fail(reason: str = "", pytrace: bool = True) -> NoReturn:
    raise Failed(reason)


def skip(reason: str = "", *, allow_module_level: bool = False) -> NoReturn:
    raise Skipped(reason)


def main(*arguments: Any, **options: Any) -> int:
    """Do nothing: the tests run once the module has."""
    return 0


class _Raised:
    """Result of `with raises(...) as raised`: raised.value is the exception."""

    value: Any = None
    type: Any = None
    tb: Any = None

    def __init__(self, expected: Any, match: Any = None, check: Any = None):
        self._expected, self._match, self._check = expected, match, check

    def __enter__(self) -> "_Raised":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise Failed(f"nothing raised {self._expected}")
        if not issubclass(kind, self._expected):
            return False
        self.value, self.type, self.tb = error, kind, trace
        if self._match is not None:
            self.match(self._match)
        if self._check is not None and not self._check(error):
            raise Failed("check returned False")
        return True

    @property
    def typename(self) -> str:
        return self.type.__name__

    def match(self, pattern: Any) -> bool:
        if not re.search(pattern, str(self.value)):
            raise Failed(f"{pattern!r} is not in {str(self.value)!r}")
        return True

    def exconly(self, tryshort: bool = False) -> str:
        return f"{self.typename}: {self.value}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"uses {name} of the result of pytest.raises")


def raises(expected: Any, *call: Any, **options: Any) -> Any:
    if not call:
        return _Raised(expected, **options)
    with _Raised(expected) as raised:
        call[0](*call[1:], **options)
    return raised


class _Warned(warnings.catch_warnings):
    """Records warnings; at its end one must fit."""

    def __init__(self, expected: Any, match: Any = None):
        super().__init__(record=True)
        self._expected, self._match = expected, match
        self.list: list[Any] = []

    def __enter__(self) -> "_Warned":  # type: ignore[override]
        recorded: Any = super().__enter__()
        self.list = recorded
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None:
            return
        fitting = [each for each in self.list if issubclass(each.category, self._expected)]
        if not any(self._match is None or re.search(self._match, str(each.message)) for each in fitting):
            raise Failed(f"nothing warned of {self._expected}")
        for each in self.list:
            if each not in fitting:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

    def __len__(self) -> int:
        return len(self.list)

    def __getitem__(self, index: Any) -> Any:
        return self.list[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.list)

    def pop(self, category: Any = Warning) -> Any:
        return self.list.pop(
            next(i for i, each in enumerate(self.list) if issubclass(each.category, category))
        )


def warns(expected: Any = Warning, *call: Any, **options: Any) -> Any:
    if not call:
        return _Warned(expected, **options)
    with _Warned(expected):
        return call[0](*call[1:], **options)


class Mark(NamedTuple):
    """Mark("skipif", (True,), {"reason": "later"})"""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class MarkDecorator:
    def __init__(self, mark: Mark):
        self.mark = mark

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and not options:
            (marked,) = arguments
            function: Any = getattr(marked, "__func__", marked)
            is_function = callable(function) and getattr(function, "__name__", "<lambda>") != "<lambda>"
            if inspect.isclass(marked) or is_function:
                cast(Any, function).pytestmark = [*own_marks(function), self.mark]
                return marked
        name, before, keywords = self.mark
        return MarkDecorator(Mark(name, before + arguments, keywords | options))


class _Marks:
    def __getattr__(self, name: str) -> MarkDecorator:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in pytest_names.REFUSED_MARKS:
            refuse(f"uses pytest.mark.{name}")
        return MarkDecorator(Mark(name, (), {}))


mark = _Marks()


def own_marks(marked: Any) -> list[Mark]:
    """Return the marks of a function, class or module, without those of a class's bases."""
    marks = vars(marked).get("pytestmark", []) if hasattr(marked, "__dict__") else []
    return [getattr(each, "mark", each) for each in (marks if isinstance(marks, list | tuple) else [marks])]


class Param:
    def __init__(self, values: tuple[Any, ...], marks: Any):
        self.values = values
        self.marks = [each.mark for each in (marks if isinstance(marks, list | tuple | set) else [marks])]


def param(*values: Any, marks: Any = (), id: Any = None) -> Param:
    return Param(values, marks)


@dataclasses.dataclass(eq=False)
class Fixture:
    """A function with `@fixture`; also a setup function of a module or class."""

    function: Any
    scope: str = "function"
    params: list[Any] | None = None
    autouse: bool = False
    name: str | None = None

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        refuse("calls a fixture directly")


def fixture(
    function: Any = None,
    *,
    scope: Any = "function",
    params: Any = None,
    autouse: bool = False,
    ids: Any = None,
    name: str | None = None,
) -> Any:
    if scope not in SCOPES:
        refuse(f"uses a fixture of scope {scope!r}")

    def made(function: Callable[..., Any]) -> Fixture:
        return Fixture(function, scope, None if params is None else list(params), autouse, name)

    return made if function is None else made(function)


class Captured(NamedTuple):
    out: str
    err: str


def capsys() -> Iterator[Any]:
    """Yield what pytest's capsys does: readouterr() returns the texts since its last call."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()

    def readouterr() -> Captured:
        texts = Captured(sys.stdout.getvalue(), sys.stderr.getvalue())  # type: ignore[attr-defined]
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return texts

    try:
        yield types.SimpleNamespace(readouterr=readouterr)
    finally:
        sys.stdout, sys.stderr = before


def module() -> types.ModuleType:
    """Return a module with the names of pytest that there are; another one refuses the row."""
    made = types.ModuleType("pytest")
    vars(made).update({name: globals()[name] for name in pytest_names.NAMES})
    vars(made)["__getattr__"] = _missing
    return made


def _missing(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    refuse(f"uses pytest.{name}")
