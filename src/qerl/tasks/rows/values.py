"""Find values of a row that a run could not tokenize, send to a worker process or store.

not valid Unicode    half a surrogate pair ("\\ud83d"), which UTF-8 cannot hold
not finite           NaN or an infinite number, which is no JSON and compares with no answer
nested too deeply    more lists and objects inside each other than Python's recursion leaves room for
"""

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100
"""Lists and objects inside each other. Pickling recurses three times per level, of Python's 1,000."""
_PLAIN = (bool, int, type(None))
_NOT_FINITE = "not a finite number; write null for a missing one"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # json.dumps would make one for each value


def value_fault(row: Mapping[str, Any]) -> str | None:
    """Return the first fault: "answer is not valid Unicode"; None if all values can be used."""
    for name, value in row.items():
        kind = type(value)
        if kind is str:
            fault = None if is_unicode(value) else "is not valid Unicode"
        elif kind is float:
            fault = None if math.isfinite(value) else f"is {value}, {_NOT_FINITE}"
        else:
            fault = None if kind in _PLAIN else _nested_fault(value)
        if fault is not None or not is_unicode(name):
            return f"{name!a} {fault or 'is not a valid column name'}"
    return None


def is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_json(value: Any) -> bool:
    """True if the value is JSON serializable; images, bytes and dates are not passed to rewards."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _nested_fault(value: Any) -> str | None:
    too_deep = f"nests lists or objects more than {MAX_DEPTH} deep"
    try:
        text = _ENCODER.encode(value)
    except RecursionError:
        return too_deep
    except (TypeError, ValueError):  # rewards do not get what is not JSON, but NaN is JSON to Python
        return f"has a number that is {_NOT_FINITE}" if is_json(value) else None
    if not is_unicode(text):
        return "is not valid Unicode"
    # Brackets inside strings count too, so only many of them say that a closer look is worth it.
    return too_deep if text.count("[") + text.count("{") > MAX_DEPTH and depth_of(value) > MAX_DEPTH else None


def depth_of(value: Any) -> int:
    """Return how deep lists and objects nest, without recursion."""
    level, depth = [value], 0
    while True:
        level = [v for v in level if isinstance(v, list | tuple | dict)]
        if not level:
            return depth
        depth += 1
        level = [item for v in level for item in (v.values() if isinstance(v, dict) else v)]
