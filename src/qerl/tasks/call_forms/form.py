"""Forms of tool calls in text.

A form reads at a place where one of its `opens` begins. It decides as soon as the text allows it and never
changes its decision when more text follows, so that pieces of any length give the calls of the whole text.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments of each offered function."""

_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)|[{}\[\]]', re.DOTALL)
_BETWEEN = re.compile(r"[\s;,]*+")
_BARE = re.compile(r"\s*+(?:\[\s*+)?+(?:\{|\Z)")
_AFTER_NAME = re.compile(r"\s*+(?:\{|\Z)")
_BARE_NAME = re.compile(r"([\w.:/-]++)\s*+(?=\{)")


@dataclasses.dataclass(frozen=True, slots=True)
class RawCall:
    name: Any
    arguments: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Calls that end at a place of the text; no calls: the open is text."""

    calls: tuple[RawCall, ...]
    end: int


Match = Callable[[str, int], re.Match[str] | None]
"""A method of a pattern."""
Reader = Callable[[str, int, Schemas, bool], Reading | None]
"""Reads the calls at a place of the text, after one of `opens`; None: more text is needed, which is never
returned if the last parameter says that the text is complete."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    name: str
    markers: tuple[str, ...]
    """Texts of a chat template, any of which shows this form."""
    opens: tuple[str, ...]
    read: Reader
    controls: tuple[str, ...]
    """Texts of the opens and of what is read that may be special tokens, which detokenizing drops."""
    is_bare: bool = False
    """Also read an answer that is only JSON as calls."""
    has_bare_names: bool = False
    """Also read an answer of names, each followed by its arguments as JSON, as calls."""
    num_id_characters: int | None = None
    """Length of an id; None: call_ and 24 characters."""


MALFORMED = Reading((), -1)


def json_end(text: str, place: int) -> int | None:
    """Return the end of the object or list that begins at the place; None if it is incomplete."""
    depth = 0
    for part in _JSON_PART.finditer(text, place):
        if part[0] in "{[":
            depth += 1
        elif part[0] in "}]":
            depth -= 1
            if depth <= 0:
                return part.end()
    return None


def calls_of_json(text: str) -> tuple[RawCall, ...]:
    """Return the calls of one JSON object, or of a list of objects; none if any is not a call."""
    try:
        values = json.loads(text)
        values = values if isinstance(values, list) else [values]
        calls = []
        for value in values:
            value = value.get("function", value) if isinstance(value.get("function"), dict) else value
            calls.append(RawCall(value["name"], value.get("arguments", value.get("parameters", {}))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()
    return tuple(calls)


def json_reader(closes: tuple[str, ...]) -> Reader:
    """Return what reads JSON calls up to a closing text; without `closes` one value is read."""

    def read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
        calls: list[RawCall] = []
        while True:
            place = _skip(text, place)
            close = next((each for each in closes if text.startswith(each, place)), None)
            if calls and (close is not None or not closes):
                return Reading(tuple(calls), place + len(close or ""))
            rest = text[place : place + 40]
            if not rest or any(each.startswith(rest) for each in closes):
                return None if not is_end else Reading(tuple(calls), place if not rest else len(text))
            end = json_end(text, place) if rest[0] in "{[" else place
            if end is None and not is_end:
                return None
            new_calls = calls_of_json(text[place:end])
            if not new_calls:
                return MALFORMED
            assert end is not None
            calls, place = [*calls, *new_calls], end
            if not closes:
                return Reading(tuple(calls), place)

    return read


def named_reader(
    head: Match, part: Match, tail: Match | None = None, part_of_tail: Match | None = None
) -> Reader:
    """Return what reads a name and its arguments as JSON. head: up to the object, its only group that matched
    is the name; part: a whole text that may become a head; tail: what may follow the object, and
    part_of_tail: a whole text that may become more of it."""

    def read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
        named = head(text, place)
        if named is None:
            is_open = part(text, place) is not None
            return None if is_open and not is_end else MALFORMED
        end = json_end(text, named.end())
        if end is None:
            return MALFORMED if is_end else None
        call = RawCall(named[named.lastindex or 0], text[named.end() : end])
        if tail is not None and part_of_tail is not None:
            if part_of_tail(text, end) and not is_end:
                return None
            end = rest.end() if (rest := tail(text, end)) else end
        return Reading((call,), end)

    return read


def read_arguments(
    text: str, place: int, part: Match, end: Match
) -> tuple[list[tuple[str, str]], int] | None:
    """Return the keys and texts of a call's arguments, each between tags, and the end of the call; None if it
    is incomplete. part: the start of an argument, group 1 its key, or the end of the call; end: that of an
    argument."""
    pairs = list[tuple[str, str]]()
    while (start := part(text, place)) is not None:
        if start[1] is None:
            return pairs, start.end()
        stop = end(text, start.end())
        if stop is None:
            return None
        pairs.append((start[1], text[start.end() : stop.start()]))
        place = stop.end()
    return None


def may_be_bare(form: CallForm, text: str, names: Collection[str]) -> bool:
    """Return whether the beginning of an answer may become calls without any open."""
    if form.is_bare and _BARE.match(text):
        return True
    text = text.lstrip()
    return form.has_bare_names and any(
        name.startswith(text) or (text.startswith(name) and _AFTER_NAME.match(text, len(name)))
        for name in names
    )


def bare_calls(form: CallForm, text: str) -> tuple[RawCall, ...]:
    """Return the calls of a whole answer without any open; none if it is anything else."""
    calls, place = list[RawCall](), _skip(text, 0)
    while form.is_bare and place < len(text):
        name = _BARE_NAME.match(text, place) if form.has_bare_names else None
        start = place if name is None else name.end()
        end = json_end(text, start) if text[start : start + 1] in ("{", "[") else None
        if end is None:
            return ()
        written = text[start:end]
        new_calls = calls_of_json(written) if name is None else (RawCall(name[1], written),)
        if not new_calls:
            return ()
        calls, place = [*calls, *new_calls], _skip(text, end)
    return tuple(calls)


def _skip(text: str, place: int) -> int:
    match = _BETWEEN.match(text, place)
    return place if match is None else match.end()


def typed(value: str, schema: Mapping[str, Any], name: str) -> Any:
    """Return an argument that is written as plain text: a string if the schema says so or it is no JSON."""
    properties = schema.get("properties")
    kind = properties.get(name) if isinstance(properties, dict) else None
    if isinstance(kind, dict) and kind.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
