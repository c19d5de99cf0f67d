"""Check numbers among the fields of a config or the options of a command.

`prefix` comes before a field's name in the message, such as `algo.`; None is not checked, nor an empty tuple.
"""

from collections.abc import Iterator
from typing import Any

from qerl.errors import require


def check_positive(settings: Any, *names: str, prefix: str = "") -> None:
    """Raise UserError unless these fields are above 0."""
    for name, value in _numbers(settings, names):
        require(value > 0, f"{prefix}{name} must be positive, got {value}")


def check_not_negative(settings: Any, *names: str, prefix: str = "") -> None:
    """Raise UserError unless these fields are at least 0."""
    for name, value in _numbers(settings, names):
        require(value >= 0, f"{prefix}{name} must not be negative, got {value}")


def _numbers(settings: Any, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each field, and of each item of a tuple."""
    for name in names:
        value = getattr(settings, name)
        items = value if isinstance(value, tuple) else (value,)
        yield from ((name, item) for item in items if item is not None)
