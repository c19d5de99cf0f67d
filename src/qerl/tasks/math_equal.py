r"""Decide whether two answers are mathematically equal, whatever their spelling.

    several     1, 2  =  2 and 1  =  \{2, 1\}  =  x = 1 or x = 2;   \pm a is a and -a;   order does not count
    in order    (1, 2), [0, 1), matrices, 10:30, x = 1, y = 2   part by part, and the brackets must agree;
                an inequality is its interval, a union several of them
    equation    f = g is h = k where f - g is a constant times h - k;   x = 5 is also 5
    quantity    a unit missing on one side is ignored (5 = 5 cm), 5 cm is not 5 m, and 10% = 10 = 0.1
    number      exact: 0.5 = 1/2 = \frac{2}{4}, and 0.333 is not 1/3; mixed numbers, bases, repeating decimals
    expression  parsed by latex2sympy2_extended, as in math-verify, and compared at several points with 50
                digits, of which 40 must agree. No simplification, which may not terminate.
    text        the same words, ignoring case

Test cases: tests/tasks/answers.tsv.
"""

import re
from fractions import Fraction
from typing import Any, NamedTuple

from qerl.tasks.answer import normalize
from qerl.tasks.symbolic import agree, is_multiple
from qerl.tasks.units import as_number, split_unit

_OPEN, _CLOSED = "([{", ")]}"
_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|<|>")
_MATRIX = re.compile(r"^\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}$", re.DOTALL)
_NAME = re.compile(
    r"^(?:m? ?\\angle ?[A-Z]+|\\?[A-Za-z]+(?:_\{?\w+\}?)?'?"
    r"|[A-Za-z]\([A-Za-z, ]+\)|\([A-Za-z](?:, ?[A-Za-z])+\))$"
)
# 1,234 with any text around it; in brackets, or with another comma, the comma separates parts.
_GROUPED = re.compile(r"^[^,()\[\]{}]*(?<!\d)\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)[^,()\[\]{}]*$")
_CHOICE = re.compile(r"^(?:(?:option|choice)?\s*\(?\s*([A-Za-z])\s*\)?|\(\s*([A-E])\s*\)\s+\S.*)$")
_BASE = re.compile(r"^([0-9A-F]+)_\{?(\d+)\}?$")
_MAX_CHARACTERS = 500
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")


class Several(NamedTuple):
    """1, 2: an answer with several parts in any order."""

    parts: tuple[Any, ...]


class Tuple(NamedTuple):
    """(1, 2): parts in order, with their brackets: "()", "[)", or "matrix" for rows."""

    brackets: str
    parts: tuple[Any, ...]


class Time(NamedTuple):
    """10:30 or 2:30 pm; also a ratio such as 2:3."""

    parts: tuple[str, ...]
    half: str | None


class Equation(NamedTuple):
    left: str
    right: str


def is_equal(expected: str, answer: str) -> bool:
    # A long text is no answer, and its brackets may exceed the recursion limit.
    if max(len(expected), len(answer)) > _MAX_CHARACTERS:
        return expected == answer
    a, b = normalize(expected), normalize(answer)
    if _without_spaces(a) == _without_spaces(b):
        return True
    if (choice := _CHOICE.match(a)) and (other := _CHOICE.match(b)):
        first, second = ((match[1] or match[2]).upper() for match in (choice, other))
        return first == second
    return _same(_parse(a), _parse(b))


def _without_spaces(text: str) -> str:
    return text.replace(" ", "").casefold() if _is_words(text) else text.replace(" ", "")


def _is_words(text: str) -> bool:
    """True for at least four letters, since ab is a product, and no mathematics."""
    letters = re.sub(r"[\s.'-]", "", text)
    return letters.isalpha() and (len(letters) > 3 or letters.casefold() in ("yes", "no"))


def _parse(text: str) -> Any:
    r"""Parse a normalized text as Several, Tuple, Time or Equation; return other texts unchanged."""
    text = text.strip()
    if r"\pm" in text:
        signs = (("+", "-"), ("-", "+"))
        return Several(tuple(_parse(text.replace(r"\pm", s).replace(r"\mp", t)) for s, t in signs))
    if matrix := _MATRIX.match(text):
        rows = [row for row in re.split(r"\\\\(?:\[[^]]*\])?", matrix[2]) if row.strip()]
        cells = [tuple(_parse(cell) for cell in row.split("&")) for row in rows]
        return Tuple("matrix", tuple(Tuple("row", row) for row in cells))
    if text in (r"\emptyset", r"\{\}", r"\{ \}", "{}"):
        return Several(())
    if re.fullmatch(r"\\(?:mathbb|mathbf) ?\{?R\}?", text):
        return _interval("-\\infty", "<", "\\infty", "<")
    if _GROUPED.match(text):
        text = text.replace(",", "")
    parts = _split(text, r",|;|\\cup(?![a-z])|\\?\band\b|\\?\bor\b|\\lor|\\vee")
    if len(parts) > 1:
        return _several([_parse(part) for part in parts if part.strip()])
    if brackets := _brackets(text):
        inside = _inside(text)
        parts = tuple(_parse(part) for part in _split(inside, ",|;"))
        if brackets == "{}":
            return Several(parts)
        if len(parts) > 1:
            return Tuple(brackets, parts)
        return _parse(inside) if brackets == "()" else Tuple(brackets, parts)
    return _relation(text)


def _relation(text: str) -> Any:
    element = re.split(r"\\in(?![a-z])", text, maxsplit=1)
    if len(element) == 2 and _NAME.match(element[0].strip()):
        return _parse(element[1])
    relations, sides = _RELATION.findall(text), [side.strip() for side in _RELATION.split(text)]
    if relations and all(sides):
        return _bounds(sides, relations) or text
    if "=" in text and not re.search(r"[<>!]|\\ne", text):
        sides = [side.strip() for side in text.split("=")]
        if all(sides):
            return Equation(sides[0], sides[-1])
    if time := re.fullmatch(r"(\d+ ?(?:: ?\d+)+)(?: ([ap]m))?", text):
        return Time(tuple(time[1].replace(" ", "").split(":")), time[2])
    return text


def _bounds(sides: list[str], relations: list[str]) -> Any:
    """Return the interval of a < x <= b, x < b or a < x; None for anything else."""
    if any(relation in (r"\ge", ">") for relation in relations):
        flipped = {r"\ge": r"\le", ">": "<"}
        if not all(relation in flipped for relation in relations):
            return None
        sides, relations = sides[::-1], [flipped[relation] for relation in relations[::-1]]
    if len(sides) == 3 and _NAME.match(sides[1]):
        return _interval(sides[0], relations[0], sides[2], relations[1])
    if len(sides) == 2 and (size := re.fullmatch(r"\|(.+)\|", sides[0])) and _NAME.match(size[1]):
        return _interval(f"-({sides[1]})", relations[0], sides[1], relations[0])
    if len(sides) == 2 and _NAME.match(sides[0]):
        return _interval(r"-\infty", "<", sides[1], relations[0])
    if len(sides) == 2 and _NAME.match(sides[1]):
        return _interval(sides[0], relations[0], r"\infty", "<")
    return None


def _interval(low: str, low_relation: str, high: str, high_relation: str) -> Tuple:
    return Tuple(("(" if low_relation == "<" else "[") + (")" if high_relation == "<" else "]"), (low, high))


def _several(parts: list[Any]) -> Any:
    """Return equations for different names as a Tuple in the order of names, other parts as Several."""
    if all(isinstance(part, Equation) and _NAME.match(part.left) for part in parts):
        names = [part.left for part in parts]
        if len(set(names)) == len(names):
            return Tuple("()", tuple(part.right for part in sorted(parts, key=lambda part: part.left)))
    flat = [p for part in parts for p in (part.parts if isinstance(part, Several) else (part,))]
    return Several(tuple(flat))


def _brackets(text: str) -> str | None:
    r"""Return `()`, `[)`, `{}` etc. if one pair of brackets encloses the whole text."""
    bare = text.replace(r"\{", "{").replace(r"\}", "}")
    if len(bare) < 2 or bare[0] not in _OPEN or bare[-1] not in _CLOSED:
        return None
    depth = 0
    for index, c in enumerate(bare):
        depth += (c in _OPEN) - (c in _CLOSED)
        if depth == 0 and index < len(bare) - 1:
            return None
    return bare[0] + bare[-1] if depth == 0 else None


def _inside(text: str) -> str:
    text = text[2:] if text.startswith(r"\{") else text[1:]
    return text[:-2] if text.endswith(r"\}") else text[:-1]


def _split(text: str, separators: str) -> list[str]:
    """Split at the separators outside of brackets."""
    parts, depth, start = [], 0, 0
    for token in re.finditer(rf"(?P<open>[(\[{{])|(?P<closed>[)\]}}])|(?P<cut>{separators})", text):
        if token["cut"] is None:
            depth += 1 if token["open"] else -1
        elif depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _same(a: Any, b: Any) -> bool:
    a, b = _alone(a), _alone(b)
    if isinstance(a, Several) or isinstance(b, Several):
        return isinstance(a, Several) and isinstance(b, Several) and _covers(a, b) and _covers(b, a)
    if isinstance(a, Tuple) and isinstance(b, Tuple):
        is_alike = a.brackets == b.brackets and len(a.parts) == len(b.parts)
        return is_alike and all(_same(x, y) for x, y in zip(a.parts, b.parts, strict=True))
    if isinstance(a, Time) and isinstance(b, Time):
        return a.parts == b.parts and (a.half == b.half or None in (a.half, b.half))
    if isinstance(a, Equation) and isinstance(b, Equation):
        return (a.left == b.left and _same(_value(a), _value(b))) or _same_equation(a, b)
    if isinstance(a, Equation) or isinstance(b, Equation):
        a, b = _value(a), _value(b)
        return a is not None and b is not None and not isinstance(a, Equation) and _same(a, b)
    return isinstance(a, str) and isinstance(b, str) and _same_quantity(a, b)


def _alone(value: Any) -> Any:
    return _alone(value.parts[0]) if isinstance(value, Several) and len(value.parts) == 1 else value


def _covers(a: Several, b: Several) -> bool:
    return all(any(_same(x, y) for y in b.parts) for x in a.parts)


def _value(answer: Any) -> Any:
    """Return the value that an equation assigns to a name; None if neither side is a name."""
    if not isinstance(answer, Equation):
        return answer
    if _NAME.match(answer.left) or not re.search("[A-Za-z]", answer.left + answer.right):
        return _parse(answer.right)
    return _parse(answer.left) if _NAME.match(answer.right) else None


def _same_equation(a: Equation, b: Equation) -> bool:
    sides = [_exact(side) for equation in (a, b) for side in (equation.left, equation.right)]
    return is_multiple(f"({sides[0]}) - ({sides[1]})", f"({sides[2]}) - ({sides[3]})")


def _same_quantity(a: str, b: str) -> bool:
    (number_a, unit_a), (number_b, unit_b) = split_unit(a), split_unit(b)
    if unit_a is not None and unit_b is not None:
        if unit_a.powers != unit_b.powers:
            return _without_spaces(a) == _without_spaces(b)
        return _same_number(number_a, number_b, unit_a.factor / unit_b.factor)
    if _same_number(number_a, number_b):
        return True
    for number, unit, other in ((number_a, unit_a, number_b), (number_b, unit_b, number_a)):
        if unit is not None and (times := as_number(unit)):
            return agree(rf"{times} \cdot ({_exact(number)})", _exact(other))
    return False


def _same_number(a: str, b: str, ratio: Fraction = Fraction(1)) -> bool:
    a, b = a.strip(), b.strip()
    if _without_spaces(a) == _without_spaces(b):
        return ratio == 1
    if _is_words(a) or _is_words(b):
        return False
    return agree(rf"{ratio.numerator} \cdot ({_exact(a)})", rf"{ratio.denominator} \cdot ({_exact(b)})")


def _exact(text: str) -> str:
    """Write decimals as fractions of integers, because the parser turns decimals into floats."""
    text = text.strip()
    if base := _BASE.match(text):
        try:
            return str(int(base[1], int(base[2])))
        except ValueError:
            return text
    text = _REPEATING.sub(_repeating, text)
    text = re.sub(r"^(-?) ?(\d+) ?\\frac\{(\d+)\}\{(\d+)\}$", r"\1(\2 + \\frac{\3}{\4})", text)
    text = re.sub(r"^(-?) ?(\d+) (\d+) ?/ ?(\d+)$", r"\1(\2 + \\frac{\3}{\4})", text)
    text = re.sub(r"(\d+(?:\.\d+)?) ?\^\\circ", r"(\\frac{\1 \\pi}{180})", text)
    text = re.sub(r"(?<![\w}])(\d+\.?\d*)[eE]([-+]?\d{1,3})\b", r"(\1 \\cdot 10^{\2})", text)
    text = re.sub(r"(\^|_)(\d{2,})", r"\1{\2}", text)
    return re.sub(r"(?<![\d.])(\d*)\.(\d*)(?![\d.])", _fraction, text)


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match[1] or "0", match[2], match[3]
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = Fraction(int(whole + fixed), 10 ** len(fixed)) + Fraction(int(repeated), nines)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _fraction(match: re.Match[str]) -> str:
    whole, decimals = match[1], match[2]
    if not whole and not decimals:
        return match[0]
    if not decimals:
        return whole
    return rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"
