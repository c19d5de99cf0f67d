"""Describe the values that a reward carries as text: equal for equal values, in any process.

    numbers, texts, None         repr, which tells 1 from 1.0 and True
    lists, tuples, sets, dicts   their items; sets and dicts in the order of the items' text
    arrays and tensors           dtype, shape and bytes
    functions and classes        their name; what they are made of is read by sources.py
    other objects                class and state, as pickle takes them apart

An object that cannot be taken apart (a lock, a connection, a generator, more than 64 MB) is not described
but named in `unknown`, and so is an installed package's object with such a part: the rest of it may differ
from run to run without meaning.
"""

import copyreg
import functools
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_CONSTANTS = (str, bytes, int, float, complex, bool, type(None), type(...), type(NotImplemented))
_MAX_BYTES, _MAX_DEPTH, _BYTES_PER_VALUE = 64 << 20, 50, 100


class StateReader:
    """Describes values, each once: later a reference says that it is the same object."""

    def __init__(self, read: Callable[[Any, str], None], is_users: Callable[[Any], bool]):
        """read: collects the code of a function, class, method or partial that a value contains.
        is_users: True if the code of a function, class or object is the user's."""
        self.unknown: list[str] = []
        self._read, self._is_users, self._bytes_left = read, is_users, _MAX_BYTES
        self._known: dict[int, tuple[int, Any]] = {}

    def describe(self, value: Any, place: str, depth: int = 0) -> str:
        """Return the value as text; place: how the user gets at it."""
        if type(value) in _CONSTANTS:
            self._bytes_left -= len(value) if isinstance(value, str | bytes) else 0
            return repr(value) if self._bytes_left >= 0 else self._cannot_tell(value, place)
        if id(value) in self._known:
            return f"#{self._known[id(value)][0]}"
        self._known[id(value)] = len(self._known), value
        self._bytes_left -= _BYTES_PER_VALUE
        if depth > _MAX_DEPTH or self._bytes_left < 0:
            return self._cannot_tell(value, place)
        kind = type(value).__qualname__
        if type(value) in (list, tuple, deque):
            return f"{kind}({', '.join(self._parts(value, place, depth))})"
        if type(value) in (set, frozenset):
            known = dict(self._known)  # the order of a set differs from process to process
            parts = sorted(self._parts(value, place, depth))
            self._known = known
            return f"{kind}({', '.join(parts)})"
        if type(value) is dict:
            return f"{kind}({', '.join(sorted(self._items(value, place, depth)))})"
        return self._code(value, place) or self._array(value, place) or self._object(value, place, depth)

    def read_users(self, value: Any, place: str, depth: int = 0) -> None:
        """Read the user's functions and objects in a value of qerl's own, which is not described."""
        if type(value) in _CONSTANTS or depth > _MAX_DEPTH or id(value) in self._known:
            return
        if isinstance(value, list | tuple | set | dict):
            for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
                self.read_users(item, place, depth + 1)
        elif self._is_users(value := getattr(value, "__func__", value)):
            if callable(value):
                self._read(value, place)
        elif not inspect.isclass(value) and not isinstance(value, ModuleType | FunctionType):
            self._known[id(value)] = len(self._known), value
            self.read_users(getattr(value, "__dict__", None), place, depth + 1)

    def _parts(self, values: Any, place: str, depth: int) -> list[str]:
        return [self.describe(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(values)]

    def _items(self, values: dict[Any, Any], place: str, depth: int) -> list[str]:
        described = (
            (self.describe(key, place, depth + 1), self.describe(item, f"{place}[{key!r:.40}]", depth + 1))
            for key, item in values.items()
        )
        return [f"{key}: {item}" for key, item in described]

    def _code(self, value: Any, place: str) -> str:
        """Describe what is code; return nothing for anything else."""
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | type(None)):
            return f"function {value.__module__}.{value.__qualname__}"
        if isinstance(value, FunctionType | functools.partial) or inspect.ismethod(value):
            self._read(value, place)
            return f"function {getattr(value, '__qualname__', '')}"
        if inspect.isclass(value):
            self._read(value, place)
            return f"class {value.__module__}.{value.__qualname__}"
        return ""

    def _array(self, value: Any, place: str) -> str:
        """Describe an array of NumPy or a tensor; return nothing for anything else."""
        torch, numpy = (sys.modules.get(name) for name in ("torch", "numpy"))
        if torch is not None and isinstance(value, torch.Tensor):
            self._bytes_left -= value.nbytes
            if value.layout is not torch.strided or value.device.type == "meta" or self._bytes_left < 0:
                return self._cannot_tell(value, place)
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
        if numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            self._bytes_left -= value.nbytes
            if self._bytes_left < 0:
                return self._cannot_tell(value, place)
            return f"{value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
        return ""

    def _object(self, value: Any, place: str, depth: int) -> str:
        kind, num_unknown = type(value), len(self.unknown)
        wrapped = getattr(value, "__wrapped__", None)  # of functools.cache
        if isinstance(wrapped, FunctionType):
            return f"{kind.__qualname__} of {self.describe(wrapped, place, depth + 1)}"
        try:
            reduce = copyreg.dispatch_table.get(kind)
            made = reduce(value) if reduce else value.__reduce_ex__(4)
            made = (made,) if isinstance(made, str) else (*made[:3], *map(list, filter(None, made[3:5])))
        except Exception:  # the object's own code
            return self._cannot_tell(value, place)
        self._read(kind, place)
        parts = [self._described_state(part, place, depth) for part in made]
        if len(self.unknown) > num_unknown and not self._is_users(kind):
            del self.unknown[num_unknown:]
            return self._cannot_tell(value, place)
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(parts)})"

    def _described_state(self, part: Any, place: str, depth: int) -> str:
        if type(part) is not dict or not all(isinstance(name, str) for name in part):
            return self.describe(part, place, depth + 1)
        attributes = sorted(part.items())
        return str([f"{name}: {self.describe(it, f'{place}.{name}', depth + 1)}" for name, it in attributes])

    def _cannot_tell(self, value: Any, place: str) -> str:
        self.unknown.append(f"{place} (a {type(value).__qualname__})")
        return type(value).__qualname__
