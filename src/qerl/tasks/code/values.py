"""Turn values into JSON data and back, for processes that do not trust each other.

A subclass of int, list or dict with its own __eq__ arrives as an int, list or dict. Dates, decimals,
fractions, builtin types, and NumPy's arrays and scalars of numbers are plain data too. Any other object is
what `other` makes of it; by default it is refused.

This file imports the standard library only: qerl need not be importable in the child (child.py).
"""

import builtins
import importlib
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

_BY_NAME = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_SCALARS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, lambda value: hex(int(value)), lambda text: int(text, 16)),
    "bytes": (bytes | bytearray, lambda value: value.hex(), bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "range": (
        range,
        lambda value: encode([value.start, value.stop, value.step]),
        lambda r: range(*decode(r)),
    ),
}
"""By name: the type, the content of a value, and the value of a content."""
_AS_TEXT = ("decimal.Decimal", "fractions.Fraction", "datetime.date", "datetime.datetime", "datetime.time")
_NUMBERS = re.compile(r"[<>|=][biufc]\d{1,2}")


def refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is not plain data")


def encode(value: Any, other: Callable[[Any], Any] = refuse) -> Any:
    """Return the value as JSON data; other(object) returns that of an object which is not plain data."""
    if value is None or isinstance(value, bool):
        return value
    for name, (kind, content, _) in _SCALARS.items():
        if isinstance(value, kind):
            return {name: content(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, other) for item in list(value)]
    for name, kind in _BY_NAME.items():
        if isinstance(value, kind):
            return {name: [encode(item, other) for item in list(value)]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in dict(value).items()]}
    return _encode_rare(value, other)


def _encode_rare(value: Any, other: Callable[[Any], Any]) -> Any:
    if isinstance(value, type) and _builtin_type(value.__name__) is value:
        return {"type": value.__name__}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind in _AS_TEXT:
        return {kind: value.isoformat() if hasattr(value, "isoformat") else str(value)}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        if _NUMBERS.fullmatch(value.dtype.str) and isinstance(value, numpy.generic):
            return encode(value.item(), other)
        if _NUMBERS.fullmatch(value.dtype.str):
            return {"array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    return other(value)


def _builtin_type(name: str) -> type | None:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) else None


def decode(value: Any, special: Callable[[str, Any], Any] | None = None) -> Any:
    """Invert `encode`; special(name, content) makes the value of a kind that is none of encode's own."""
    if isinstance(value, list):
        return [decode(item, special) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in _BY_NAME:
        return _BY_NAME[name](decode(item, special) for item in content)
    if name == "dict":
        return {decode(key, special): decode(item, special) for key, item in content}
    if name in _SCALARS:
        return _SCALARS[name][2](content)
    if name == "type" and (kind := _builtin_type(content)) is not None:
        return kind
    if name in _AS_TEXT:
        module, _, name = name.partition(".")
        kind = getattr(importlib.import_module(module), name)
        return getattr(kind, "fromisoformat", kind)(content)
    if name == "array":
        return _array(*content)
    if special is not None:
        return special(name, content)
    raise ValueError(f"unknown kind of value: {name!r}")


def _array(kind: str, shape: list[int], content: str) -> Any:
    import numpy

    if not _NUMBERS.fullmatch(kind):
        raise ValueError(f"unknown kind of array: {kind!r}")
    return numpy.frombuffer(bytearray.fromhex(content), dtype=kind).reshape(shape)
