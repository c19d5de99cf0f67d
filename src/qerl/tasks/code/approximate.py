"""Compare numbers as pytest.approx does: |value - expected| <= max(rel |expected|, abs).

rel is 1e-6 if neither is given, and does not count if only abs is; abs is 1e-12. Lists, tuples, dicts and
arrays are compared item by item; they are not nested. Other values must be equal.
Compared with pytest's in tests/tasks/code/test_approximate.py.
"""

import cmath
import math
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from numbers import Complex
from typing import Any

_NUMBERS = (Complex, Decimal)


class approx:
    __array_ufunc__ = None  # NumPy leaves the comparison to __eq__
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: Any = None, abs: Any = None, nan_ok: bool = False):
        self.expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok
        items = expected.values() if isinstance(expected, Mapping) else expected
        if isinstance(expected, Mapping) or _is_sequence(expected):
            if any(isinstance(item, type(expected)) for item in items):
                raise TypeError("pytest.approx() does not support nested data structures")
        elif (
            isinstance(expected, Collection)
            and not isinstance(expected, str | bytes)
            and not _is_array(expected)
        ):
            raise TypeError("pytest.approx() only supports ordered sequences")

    def __bool__(self) -> bool:
        raise AssertionError("approx() is not supported in a boolean context")

    def __ne__(self, value: object) -> bool:
        return not self == value

    def __eq__(self, value: Any) -> bool:
        expected = self.expected
        if _is_array(expected):
            return self._equals_array(value)
        if isinstance(expected, Mapping):
            if not hasattr(value, "keys") or {*value.keys()} != {*expected.keys()}:
                return False
            return all(self._is_close(value[key], expected[key]) for key in expected)
        if _is_sequence(expected):
            has_length = hasattr(value, "__len__") and hasattr(value, "__iter__")
            if not has_length or len(value) != len(expected):
                return False
            return all(map(self._is_close, value, expected))
        if _is_array(value):
            return all(self._is_close(item, expected) for item in value.flatten().tolist())
        return self._is_close(value, expected)

    def _equals_array(self, value: Any) -> bool:
        import numpy

        is_scalar = numpy.isscalar(value)
        array: Any = value if is_scalar else numpy.asarray(value)
        if not is_scalar and array.shape != self.expected.shape:
            return False
        values = [value] * self.expected.size if is_scalar else array.flatten().tolist()
        return all(map(self._is_close, values, self.expected.flatten().tolist()))

    def _is_close(self, value: Any, expected: Any) -> bool:
        if _is_bool(expected) and not _is_bool(value):
            return False
        if value == expected:
            return True
        if _is_bool(expected) or not (isinstance(value, _NUMBERS) and isinstance(expected, _NUMBERS)):
            return False
        if cmath.isnan(expected):
            return self._nan_ok and cmath.isnan(value)
        if math.isinf(abs(expected)):
            return False
        return abs(expected - value) <= self._tolerance(expected)

    def _tolerance(self, expected: Any) -> Any:
        number: Any = Decimal if isinstance(expected, Decimal) else float
        rel, absolute = (
            number(tolerance) if number is Decimal and isinstance(tolerance, float | int) else tolerance
            for tolerance in (self._rel, self._abs)
        )
        absolute = number("1e-12") if absolute is None else absolute
        if absolute < 0 or math.isnan(absolute):
            raise ValueError("absolute tolerance can't be negative or NaN")
        if self._rel is None and self._abs is not None:
            return absolute
        relative = (number("1e-6") if rel is None else rel) * abs(expected)
        if relative < 0 or math.isnan(relative):
            raise ValueError("relative tolerance can't be negative or NaN")
        return max(relative, absolute)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "tolist") and value.shape != ()


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
