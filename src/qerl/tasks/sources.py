"""Hash what a run's rewards are made of, so that a resumed run can tell whether they are the same.

    a function or class of a file    the file, and the user's own modules that it imports
    one of a notebook or __main__    its source, else its code
    any of them                      its defaults, closure and attributes, the values of the globals that it
                                     names, and the same of the user's functions and classes among them
    a partial, method or instance    its arguments or attributes (state.py), and its function or class

Built-in rewards are qerl's own source, whose commit run.json has. Installed packages that a file imports are
not hashed. State that cannot be read, such as a connection, is named in a notice of the run.
"""

import contextlib
import functools
import hashlib
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from qerl.tasks.scoring import name_of
from qerl.tasks.state import StateReader

_INSTALLED = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}  # also of another environment, by a .pth file
_QERL = Path(__file__).parents[1]


class Sources(NamedTuple):
    hashes: dict[str, str]
    """{"reward even (even.py)": SHA-256} of what each function is made of."""
    unknown: list[str]
    """Objects whose state was not read: "even.client (a Client)"."""


def function_sources(functions: Sequence[Callable[..., Any]]) -> Sources:
    """Return the hashes of what the user's functions are made of; built-in ones have none."""
    hashes: dict[str, str] = {}
    unknown: list[str] = []
    for function in functions:
        reader = _SourceReader()
        reader.read(function, name_of(function))
        digests = [*map(file_digest, reader.files), *reader.texts]
        name = f"reward {name_of(function)}" + (f" ({reader.files[0].name})" if reader.files else "")
        while name in hashes:
            name += "'"
        if digests:
            text = "\n".join(digests).encode(errors="surrogatepass")
            hashes[name] = hashlib.sha256(text).hexdigest()
        unknown += reader.state.unknown
    return Sources(hashes, unknown)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _SourceReader:
    """Collects files and texts, each once, in the order in which they are reached."""

    def __init__(self):
        self.files: list[Path] = []
        self.texts: list[str] = []
        self._seen: dict[int, Any] = {}  # with the objects, whose ids could else be used again
        self.state = StateReader(self.read, lambda value: _owner(value) == "user")

    def read(self, value: Any, place: str) -> None:
        """Collect what a function, class, partial, method or callable object is made of.

        place: how the user gets at it, for the names of what cannot be read."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._read_function(value, place)
        elif inspect.isclass(value):
            self._read_class(value, place)
        elif isinstance(value, functools.partial):
            self.read(value.func, place)
            self._add([value.args, value.keywords], place, of=value.func)
        elif inspect.ismethod(value):
            self.read(value.__func__, place)
            self._add(value.__self__, place, of=value.__func__)
        else:
            self.read(type(value), place)
            self._add(value, place, of=value)

    def _add(self, value: Any, place: str, *, of: Any) -> None:
        """Collect data that code (of) uses. Of qerl's own, whose settings run.json has, only the user's
        functions and objects in it."""
        if _owner(of) == "qerl":
            self.state.read_users(value, place)
        else:
            self.texts.append(self.state.describe(value, place))

    def _read_function(self, function: FunctionType, place: str) -> None:
        owner = _owner(function)
        if owner == "installed":
            self.texts.append(f"{function.__module__}.{function.__qualname__}")
            return
        if owner == "user":
            is_main = function.__globals__.get("__name__") == "__main__"
            if not is_main:
                self._read_module(function.__globals__)
            self.texts.append(_source_or_code(function) if is_main else function.__qualname__)
            values = [function.__defaults__, function.__kwdefaults__, vars(function)]
            self._add(values, place, of=function)
            self._read_globals(function, place)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is still empty
                self._add(cell.cell_contents, f"{place}: {name}", of=function)

    def _read_globals(self, function: FunctionType, place: str) -> None:
        """Collect the globals that the code names, and what it names of the user's modules among them."""
        names = _names(function.__code__)
        scope = {name: function.__globals__[name] for name in names if name in function.__globals__}
        for name, value in scope.items():
            if isinstance(value, ModuleType) and _owner(value) == "user":
                self._read_module(vars(value))
                inner = [each for each in names if each in vars(value)]
                for each in inner:
                    self._add(vars(value)[each], f"{place}: {name}.{each}", of=function)
            elif name != "__builtins__":
                self._add(value, f"{place}: {name}", of=function)

    def _read_class(self, kind: type, place: str) -> None:
        owner = _owner(kind)
        if owner == "installed":
            return
        if owner == "user" and kind.__module__ != "__main__":
            self._read_module(vars(sys.modules.get(kind.__module__, object)))
        for name, member in vars(kind).items():
            parts = ["__func__", "fget", "fset", "func", "__wrapped__"]
            values = [member, *(getattr(member, part, None) for part in parts)]
            functions = [value for value in values if isinstance(value, FunctionType)]
            for function in functions:
                self.read(function, f"{place}.{name}")
            is_data = not functions and not name.startswith(("__", "_abc_"))
            if is_data and not inspect.isdatadescriptor(member):
                self._add(member, f"{place}.{name}", of=kind)
        for base in kind.__bases__:
            self.read(base, place)

    def _read_module(self, scope: Mapping[str, Any]) -> None:
        """Collect the file of a module's globals, then the user's modules that it has imported."""
        path = Path(scope.get("__file__") or "").resolve()
        if path in self.files or not path.is_file() or path.is_relative_to(_QERL):
            return
        self.files.append(path)
        for value in list(scope.values()):
            module = value if isinstance(value, ModuleType) else None
            if isinstance(value, FunctionType) or inspect.isclass(value):
                module = sys.modules.get(value.__module__)
            if module is not None and module.__name__ != "__main__" and not _is_installed(vars(module)):
                self._read_module(vars(module))


def _owner(value: Any) -> str:
    """Return whose code a function, class, method, partial, instance or module is: "user", "qerl" or
    "installed"."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        scope: Mapping[str, Any] = value.__globals__
    elif isinstance(value, ModuleType):
        scope = vars(value)
    else:
        kind = value if inspect.isclass(value) else type(value)
        scope = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
    if scope.get("__name__") == "__main__":
        return "user"
    if Path(scope.get("__file__") or "").resolve().is_relative_to(_QERL):
        return "qerl"
    is_builtin = scope.get("__name__") in sys.stdlib_module_names
    return "installed" if is_builtin or _is_installed(scope) else "user"


def _is_installed(scope: Mapping[str, Any]) -> bool:
    path = Path(scope.get("__file__") or "").resolve()
    return not _PACKAGE_FOLDERS.isdisjoint(path.parts) or any(map(path.is_relative_to, _INSTALLED))


def _source_or_code(function: FunctionType) -> str:
    """Return the source; the code of a lambda, whose line may hold other things, and where there is none."""
    try:
        if function.__name__ != "<lambda>":
            return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        pass
    return _code_text(function.__code__)


def _code_text(code: CodeType) -> str:
    consts = [_code_text(const) if isinstance(const, CodeType) else _plain(const) for const in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {consts}"


def _plain(const: Any) -> str:
    """Return the repr of a constant of code, with frozen sets in order."""
    if isinstance(const, tuple | frozenset):
        parts = list(map(_plain, const))
        return f"({', '.join(sorted(parts) if isinstance(const, frozenset) else parts)})"
    return repr(const)


def _names(code: CodeType) -> list[str]:
    """Return the global names that the code and the functions inside it use, in order."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))
