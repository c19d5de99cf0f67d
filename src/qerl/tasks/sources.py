"""Hash what a run's rewards are made of, so that a resumed run can tell whether they are the same.

    a function or class of a file    the file, and the user's own modules that it imports
    one of a notebook or __main__    its source, else its code; its defaults, its closure, and what it names

Built-in rewards are qerl's own source, whose commit run.json has. Installed packages that a file imports are
not hashed.
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
from typing import Any

from qerl.tasks.scoring import name_of

_INSTALLED = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}  # also of another environment, by a .pth file
_QERL = Path(__file__).parents[1]
_CONSTANTS = (str, bytes, int, float, bool, type(None))


def function_sources(functions: Sequence[Callable[..., Any]]) -> dict[str, str]:
    """Return {"reward even (even.py)": SHA-256} of what each function is made of."""
    sources: dict[str, str] = {}
    for function in functions:
        reader = _SourceReader()
        reader.read(function)
        digests = [*map(file_digest, reader.files), *reader.texts]
        name = f"reward {name_of(function)}" + (f" ({reader.files[0].name})" if reader.files else "")
        while name in sources:
            name += "'"
        if digests:
            sources[name] = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return sources


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _SourceReader:
    """Collects files and texts, each once, in the order in which they are reached."""

    def __init__(self):
        self.files: list[Path] = []
        self.texts: list[str] = []
        self._seen: set[int] = set()

    def read(self, value: Any) -> None:
        """Collect what a function, class, partial, method or callable object is made of."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, functools.partial):
            self.texts.append(_plain([value.args, sorted(value.keywords.items())]))
            self.read(value.func)
        elif inspect.ismethod(value):
            self.read(value.__func__)
        elif isinstance(value, FunctionType):
            self._read_function(value)
        elif inspect.isclass(value):
            self._read_class(value)
        else:
            self.read(type(value))

    def _read_function(self, function: FunctionType) -> None:
        if function.__globals__.get("__name__") != "__main__":
            self._read_module(function.__globals__)
        else:
            defaults = [function.__defaults__ or (), sorted((function.__kwdefaults__ or {}).items())]
            self.texts += [_source_or_code(function), _plain(defaults)]
            for name in _names(function.__code__):
                self._read_named(function.__globals__.get(name))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                self._read_named(cell.cell_contents)

    def _read_class(self, kind: type) -> None:
        if kind.__module__ != "__main__":
            self._read_module(vars(sys.modules.get(kind.__module__, object)))
            return
        for name, member in vars(kind).items():
            member = getattr(member, "__func__", getattr(member, "fget", member))
            if not name.startswith("__") or isinstance(member, FunctionType):
                self._read_named(member)
        for base in kind.__bases__:
            self.read(base)

    def _read_named(self, value: Any) -> None:
        """Collect a value that code refers to: a constant, a function or class, or a module of the user's."""
        if isinstance(value, (*_CONSTANTS, tuple)):
            self.texts.append(_plain(value))
        elif isinstance(value, ModuleType) and not _is_installed(vars(value)):
            self._read_module(vars(value))
        elif isinstance(value, FunctionType) or inspect.isclass(value):
            self.read(value)

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


def _names(code: CodeType) -> list[str]:
    """Return the global names that the code and the functions inside it use, in order."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _plain(value: Any) -> str:
    """Return the repr of constants; of other values, whose repr may hold an address, only the type."""
    if isinstance(value, list | tuple | frozenset):
        parts = list(map(_plain, value))
        return f"({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return repr(value) if isinstance(value, _CONSTANTS) else type(value).__qualname__
