r"""Split a number from its unit, and convert the unit to the first unit of its kind.

    5 cm  ->  ("5", Unit(factor=1/100, powers={"m": 1}))       $5  ->  ("5", Unit(1, {"dollar": 1}))
    60 miles per hour = 60 mph       36 square centimeters = 36 cm^2       5 apples: an unknown unit

An unknown word is a kind of its own. A single letter is a unit only after a space: 5 m, not 5m.
"""

import dataclasses
import re
from fractions import Fraction


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    factor: Fraction
    powers: frozenset[tuple[str, int]]


_KINDS: dict[str, dict[str, Fraction | int]] = {
    "m": {
        "mm millimeter millimetre": Fraction(1, 1000),
        "cm centimeter centimetre": Fraction(1, 100),
        "m meter metre": 1,
        "km kilometer kilometre": 1000,
        "in inch inche": Fraction(254, 10_000),
        "ft foot feet": Fraction(3048, 10_000),
        "yd yard": Fraction(9144, 10_000),
        "mi mile": Fraction(1_609_344, 1000),
    },
    "g": {
        "mg milligram": Fraction(1, 1000),
        "g gram": 1,
        "kg kilogram": 1000,
        "oz ounce": Fraction(28_349_523_125, 10**9),
        "lb pound": Fraction(45_359_237, 10**5),
    },
    "s": {"s sec second": 1, "min minute": 60, "h hr hour": 3600, "day": 86_400, "week": 604_800},
    "dollar": {"dollar usd": 1, "cent": Fraction(1, 100)},
    "euro": {"euro eur": 1},
    "liter": {"ml milliliter": Fraction(1, 1000), "l liter litre": 1},
}
_UNITS = {
    name: (Fraction(factor), kind)
    for kind, names in _KINDS.items()
    for each, factor in names.items()
    for name in each.split()
}
_COMPOUND = {"mph": "mile / hour", "kph": "km / hour"}
_DEGREE, _PERCENT = "degree", "percent"
_ENDING = re.compile(
    r"^(?P<number>.*?(?:[\d)}!]|\\pi|\.))(?P<gap>\s*)"
    r"(?P<unit>[A-Za-z][A-Za-z]*(?:\s*\^\s*\{?-?\d\}?)?(?:\s*(?:/|\s)\s*[A-Za-z]+(?:\s*\^\s*\{?-?\d\}?)?)*)$"
)


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Return the number and unit of a normalized text; (text, None) if it has no unit."""
    if text.startswith("$") or text.startswith("-$"):
        return text.replace("$", "", 1).strip(), _unit("dollar")
    if text.endswith("%"):
        return text[:-1].strip(), _unit(_PERCENT)
    if text.endswith(r"^\circ") and not re.search(r"\\(?:sin|cos|tan|cot)", text):
        return text[: -len(r"^\circ")].strip(), _unit(_DEGREE)
    match = _ENDING.match(text)
    if match is None or "_" in match["unit"]:
        return text, None
    words = re.findall("[A-Za-z]+", match["unit"])
    is_short = all(len(word) == 1 for word in words)
    is_formula = re.search(r"(?<!\\)\b[A-Za-z]", match["number"]) is not None
    is_glued = not match["gap"] and words[0].lower() not in _UNITS and words[0].lower() not in _COMPOUND
    if is_short and (is_formula or not match["gap"] or any(word not in _UNITS for word in words)):
        return text, None
    if is_glued and len(words[0]) < 4:
        return text, None
    return match["number"].strip(), _unit(match["unit"])


def as_number(unit: Unit) -> str | None:
    """Return the LaTeX factor of a unit that is a pure number: 1/100 for percent, pi/180 for degrees."""
    kinds = {kind for kind, _ in unit.powers}
    factors = {_PERCENT: r"\frac{1}{100}", _DEGREE: r"\frac{\pi}{180}"}
    return factors.get(min(kinds)) if len(kinds) == 1 else None


def _unit(text: str) -> Unit:
    text = re.sub(r"\bper\b", "/", text)
    for name, spelled in _COMPOUND.items():
        text = re.sub(rf"\b{name}\b", spelled, text)
    factor, powers = Fraction(1), {}
    sign, prefix_power = 1, 1
    for token in re.findall(r"/|[A-Za-z]+(?:\s*\^\s*\{?-?\d\}?)?", text):
        name, _, exponent = token.partition("^")
        if token == "/":
            sign = -1
        elif (word := name.strip().lower()) in ("square", "sq", "cubic"):
            prefix_power = 3 if word == "cubic" else 2
        else:
            power = sign * prefix_power * int(exponent.strip(" {}") or 1)
            one, kind = _known(word)
            factor *= one**power
            powers[kind] = powers.get(kind, 0) + power
            prefix_power = 1
    return Unit(factor, frozenset(powers.items()))


def _known(word: str) -> tuple[Fraction, str]:
    singular = word[:-1] if word.endswith("s") and len(word) > 2 else word
    return _UNITS.get(word) or _UNITS.get(singular) or (Fraction(1), singular)
