"""Read entries of a checkpoint's config.json within bounds; an error names the entry in one line."""

from collections.abc import Callable, Mapping
from typing import Any

from qerl.errors import UserError

_MAX_COUNT, _MAX_NUMBER = 1 << 31, 1e12
_MAX_SHOWN_CHARS = 80


class NotDescribedError(UserError):
    """A valid model with a part that families/ does not describe; transformers may run it."""


def short_text(value: Any, form: Callable[[Any], str] = repr) -> str:
    """Format the value on one line, cut to 80 characters."""
    text = " ".join(form(value).split())
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


class ConfigReader:
    """Entries that are null count as missing, as in transformers."""

    def __init__(self, entries: Mapping[str, Any]):
        self.entries = dict(entries)

    def get(self, name: str) -> Any:
        return self.entries.get(name)

    def filled(self, **defaults: Any) -> "ConfigReader":
        """Return it with these values where an entry is missing altogether."""
        return ConfigReader(defaults | self.entries)

    def count(self, name: str, default: int | None = None, at_most: int = _MAX_COUNT) -> int:
        """Return a positive integer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise _wrong(name, "a positive integer", value)
        if value > at_most:
            raise _wrong(name, f"at most {at_most:,}", value)
        return value

    def number(self, name: str, default: float) -> float:
        """Return a positive finite number."""
        value = self.get(name)
        return default if value is None else positive(name, value)

    def optional_number(self, name: str) -> float | None:
        """Return a positive number; None if the entry is missing, null or 0."""
        return None if self.get(name) in (None, 0) else self.number(name, 1.0)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return value

    def section(self, name: str) -> "ConfigReader":
        """Return the entries of an object; a missing one is empty."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise _wrong(name, "an object", value)
        return ConfigReader(value)

    def listed(self, name: str, length: int) -> list[Any]:
        """Return a list of this length."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or len(value) != length:
            raise _wrong(name, f"a list of {length}", value)
        return list(value)

    def choice(self, name: str, values: Mapping[str, Any], default: str) -> Any:
        """Return what the entry's text stands for."""
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, str) and value in values:
            return values[value]
        kind = NotDescribedError if isinstance(value, str) else UserError
        raise kind(f"{name} must be {' or '.join(values)}, got {short_text(value)}")

    def having(self, **entries: Any) -> "ConfigReader":
        """Return itself; raise NotDescribedError if an entry is there and has another value."""
        for name, value in entries.items():
            entry = self.get(name)
            if entry is not None and (entry != value or isinstance(entry, bool) != isinstance(value, bool)):
                raise NotDescribedError(f"{name} must be {value}, got {short_text(entry)}")
        return self


def check_multiple(name: str, value: int, of: str, divisor: int) -> None:
    """Raise UserError unless the value of an entry is a multiple of another one's."""
    if value % divisor:
        raise UserError(f"{name} must be a multiple of {of}, got {value} and {divisor}")


def positive(name: str, value: Any) -> float:
    """Return a positive finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _MAX_NUMBER:
        raise _wrong(name, "a positive number", value)
    return float(value)


def _wrong(name: str, expected: str, value: Any) -> UserError:
    return UserError(f"{name} must be {expected} in the model's config, got {short_text(value)}")
