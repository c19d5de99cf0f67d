r"""Compare LaTeX expressions by their values at a few points.

    agree(a, b)        a(x) = b(x) at every point where both are numbers, and at least at one
    is_multiple(a, b)  a(x) = c b(x) at all points with one c != 0: the equations a = 0 and b = 0 are the same

Points have both signs; a name has the same value in both expressions. Values have 50 digits, of which 40 must
agree: a nonzero algebraic number of the size of an answer is larger than 1e-40. Simplification is not needed;
for some expressions it does not terminate.
"""

import re
from typing import Any

_DIGITS, _AGREEING = 50, 40
# Neither small nor simple, so that answers have no zeros or poles there; at one point all names are negative.
_POINTS = ((7, 5), (-11, 7), (23, 17), (-3, 13), (41, 29))
_MAX_CHARACTERS = 1000


def agree(a: str, b: str) -> bool:
    first, second = _parse(a), _parse(b)
    if first is None or second is None:
        return False
    import sympy

    if any(isinstance(side, sympy.logic.boolalg.Boolean) for side in (first, second)):
        return False
    infinities = sympy.oo, sympy.zoo, -sympy.oo
    infinite = [str(side.doit()) if side.has(*infinities) else "" for side in (first, second)]
    if any(infinite):
        return infinite[0] == infinite[1]
    pairs = _pairs(first, second)
    return bool(pairs) and all(_near(x, y) for x, y in pairs)


def is_multiple(a: str, b: str) -> bool:
    first, second = _parse(a), _parse(b)
    pairs = [] if first is None or second is None else _pairs(first, second)
    if len(pairs) < 2 or any(abs(x) == 0 or abs(y) == 0 for x, y in pairs):
        return False
    (x, y), *others = pairs
    return all(_near(u * y, v * x) for u, v in others)


def _parse(text: str) -> Any:
    """Return an unevaluated sympy expression; None if the text is not an expression."""
    from latex2sympy2_extended import latex2sympy  # deferred: it takes half a second, and few rewards need it

    if any(text.count(opening) != text.count(closing) for opening, closing in ("{}", "()")):
        return None  # the parser takes seconds to reject it
    if not text.strip() or len(text) > _MAX_CHARACTERS or re.search(r"_\{?\w*$|\\text|=", text):
        return None
    try:
        expression = latex2sympy(text)
    except Exception:  # the parser may raise anything for unexpected text
        return None
    return expression if hasattr(expression, "free_symbols") else None


def _pairs(first: Any, second: Any) -> list[tuple[Any, Any]]:
    """Return both values at each point where both are finite numbers."""
    import sympy

    constants = {sympy.Symbol("i"): sympy.I, sympy.Symbol("e"): sympy.E}
    first, second = (side.subs(constants) for side in (first, second))
    names = sorted(first.free_symbols | second.free_symbols, key=str)
    pairs = []
    for over, under in _POINTS if names else _POINTS[:1]:
        point = {n: sympy.Rational(over * (2 * i + 3), under + 2 * i) for i, n in enumerate(names)}
        values = [_value(side.subs(point)) for side in (first, second)]
        if None not in values:
            pairs.append(tuple(values))
    return pairs


def _value(expression: Any) -> Any:
    import sympy

    try:
        value = expression.doit()
        value = value if value.is_Rational else sympy.N(value, _DIGITS)
    except (ArithmeticError, ValueError, TypeError, AttributeError):
        return None
    return value if value.is_number and value.is_finite else None


def _near(x: Any, y: Any) -> bool:
    if x.is_Rational and y.is_Rational:
        return x == y
    return bool(abs(x - y) * 10**_AGREEING <= max(abs(x), abs(y), 1))
