"""Check numbers among the fields of a config or the options of a command.

`prefix` comes before a field's name in the message, such as `algo.`. None and empty tuples pass.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from qerl.config.bounds import UNBOUNDED, check_bounds
from qerl.errors import UserError, require


def check_numbers(settings: Any, prefix: str = "") -> None:
    """Raise UserError for NaN, infinity or a number out of its bounds (bounds.py) in any field, of nested
    settings and in tuples too."""
    for name in _field_names(type(settings)):
        value = getattr(settings, name)
        # Most values take the short way, without a name for a message: a plan has 2,000 configs.
        if value is None or isinstance(value, str | bool) or (type(value) is int and 0 <= value < 1000):
            continue
        _check_number(value, f"{prefix}{name}")


def _check_number(value: Any, name: str) -> None:
    _check_finite(value, name)
    if isinstance(value, tuple):
        for item in value if name.rpartition(".")[2] not in UNBOUNDED else ():
            _check_number(item, name)
    elif dataclasses.is_dataclass(value):
        check_numbers(value, f"{name}.")
    elif isinstance(value, int | float):
        check_bounds(name, value)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _check_finite(value: Any, name: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{name} must be finite, got {value}")
    elif isinstance(value, tuple):
        for item in value:
            _check_finite(item, name)


def check_positive(settings: Any, *names: str, prefix: str = "") -> None:
    """Raise UserError unless these fields are above 0."""
    for name, value in _numbers(settings, names, prefix):
        require(value > 0, f"{prefix}{name} must be positive, got {value}")


def check_not_negative(settings: Any, *names: str, prefix: str = "") -> None:
    """Raise UserError unless these fields are at least 0."""
    for name, value in _numbers(settings, names, prefix):
        require(value >= 0, f"{prefix}{name} must not be negative, got {value}")


def _numbers(settings: Any, names: tuple[str, ...], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each field, and of each item of a tuple; raise UserError for one that is not
    finite."""
    for name in names:
        value = getattr(settings, name)
        _check_finite(value, f"{prefix}{name}")
        items = value if isinstance(value, tuple) else (value,)
        yield from ((name, item) for item in items if item is not None)
