"""<function_calls>NAME(KEY=VALUE, ...)</function_calls>, a call on a line: OLMo 3. A value is JSON.

Python's True, False, None and strings in single quotes are read too, where a value is nothing else.
"""

import ast
import json
import re
from typing import Any

from qerl.tasks.call_forms.form import MALFORMED, CallForm, RawCall, Reading, Schemas

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"
_PART = re.compile(
    rf"""\"(?:[^"\\]|\\.)*+(?:"|\Z)|'(?:[^'\\]|\\.)*+(?:'|\Z)|({re.escape(_CLOSE)})""", re.DOTALL
)
_NAME = re.compile(r"\s*+([\w.:/-]++)\s*+\(\s*+")
_KEY = re.compile(r"([\w.-]++)\s*+=\s*+")
_COMMA = re.compile(r"\s*+(?:,\s*+|(?=\)))")
_PYTHON = re.compile(r"(?:True|False|None)\b|'(?:[^'\\]|\\.)*+'", re.DOTALL)
_DECODER = json.JSONDecoder()


def _read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
    end = next((part for part in _PART.finditer(text, place) if part[1]), None)
    if end is None:
        return MALFORMED if is_end else None
    calls, body, place = list[RawCall](), text[place : end.start()].rstrip(), 0
    try:
        while place < len(body):
            call, place = _call(body, place)
            calls.append(call)
    except (ValueError, SyntaxError, RecursionError):
        return MALFORMED
    return Reading(tuple(calls), end.end())


def _call(body: str, place: int) -> tuple[RawCall, int]:
    """Return the call at the place, and where it ends; raise ValueError if it is none."""
    name, place = _there(_NAME.match(body, place))
    arguments = dict[str, Any]()
    while not body.startswith(")", place):
        key, place = _there(_KEY.match(body, place))
        value = _PYTHON.match(body, place)
        if value is None:
            arguments[key[1]], place = _DECODER.raw_decode(body, place)
        else:
            arguments[key[1]], place = ast.literal_eval(value[0]), value.end()
        _, place = _there(_COMMA.match(body, place))
    return RawCall(name[1], arguments), place + 1


def _there(match: re.Match[str] | None) -> tuple[re.Match[str], int]:
    """Return the match and its end; raise ValueError if there is none."""
    if match is None:
        raise ValueError
    return match, match.end()


OLMO3 = CallForm(
    name="olmo3",
    markers=(_OPEN,),
    opens=(_OPEN,),
    read=_read,
    controls=(_OPEN, _CLOSE),
)
