"""Derive hostile texts from a regular expression: repetitions of what its loops match, that then do not end.

(\\d+) ?:      1111...1\\0          a loop without what must follow it
<a>(.*?)</a>  <a><a><a>...         the beginning without its end, at every place
\\s*x?\\s*:     "    ...", "x x x"   what two loops can divide between them
"""

import re
from collections.abc import Iterator
from re import _constants as sre
from re import _parser as parser
from typing import Any

Parts = tuple[str, str, str]
"""A beginning, what is repeated, and an end."""
_CATEGORIES = {"DIGIT": "1", "SPACE": " ", "WORD": "a", "NOT_DIGIT": "x", "NOT_SPACE": "x", "NOT_WORD": " "}
_LOOPS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_NUM_PIECES, _LONG_LOOP = 7, 10


def hostile_parts(pattern: re.Pattern[Any]) -> list[Parts]:
    """Return parts of texts, of which `repeated` makes a text of any length."""
    loops: list[tuple[str, str]] = []
    whole = _witness(parser.parse(pattern.pattern, pattern.flags), "", loops)
    units = [whole, whole[:-1], whole[: len(whole) // 2], " ", "1", "a", "{", "1 ", "1,111", "\n"]
    found = {(start, unit, end) for unit in units for start, end in (("", ""), ("", "\0"), (whole, "\0"))}
    for before, unit in loops:
        found |= {(before, unit, ""), (before, unit, "\0"), ("", before + unit, "\0"), ("", before, "\0")}
    pieces = list(dict.fromkeys([unit for _, unit in loops] + [before for before, _ in loops]))[:_NUM_PIECES]
    found |= {("", one + other, "\0") for one in pieces for other in pieces}
    return sorted(parts for parts in found if parts[1])


def repeated(parts: Parts, length: int) -> str:
    start, unit, end = parts
    return (start + unit * max(1, (length - len(start)) // len(unit)))[: length - 1] + end


def _witness(steps: Any, before: str, loops: list[tuple[str, str]]) -> str:
    """Return a text that the steps match, and collect (text before it, what is repeated) of each loop."""
    text = ""
    for kind, value in steps:
        if kind in _LOOPS:
            least, most, inner = value
            unit = _witness(inner, before + text, loops)
            if most is sre.MAXREPEAT or most > _LONG_LOOP:
                loops.append((before + text, unit))
            text += unit * max(least, 1)
        elif kind is sre.SUBPATTERN or kind is sre.ATOMIC_GROUP:
            text += _witness(value[3] if kind is sre.SUBPATTERN else value, before + text, loops)
        elif kind is sre.BRANCH:
            choices = [_witness(branch, before + text, loops) for branch in value[1]]
            loops += [(before + text, choice) for choice in choices]
            text += choices[0]
        else:
            text += next(_characters(kind, value), "")
    return text


def _characters(kind: Any, value: Any) -> Iterator[str]:
    """Yield a character that one step matches; none for a step without width."""
    if kind is sre.LITERAL:
        yield chr(value)
    elif kind is sre.NOT_LITERAL or kind is sre.ANY:
        yield "x" if value != ord("x") else "y"
    elif kind is sre.RANGE:
        yield chr(value[0])
    elif kind is sre.CATEGORY:
        yield _CATEGORIES[str(value).removeprefix("CATEGORY_")]
    elif kind is sre.IN and value[0][0] is not sre.NEGATE:
        yield from _characters(*value[0])
    elif kind is sre.IN:
        outside = {character for item in value[1:] for character in _characters(*item)}
        yield from (character for character in "x 1{\\<`$a(\n" if character not in outside)
