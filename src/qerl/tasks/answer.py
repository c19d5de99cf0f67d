r"""Extract the final answer from a text, and normalize its spelling.

    final_answers   candidates for a completion's answer, best first:
                    <answer>...</answer>   \boxed{...}   after "answer is" or "Answer:"   the last $...$
                    the whole text, and the last number in it if it is prose
    gold_answer     the reference: the text after ####, or in a box, or all of it
    normalize       one spelling for \text{..}, \left, LaTeX's spaces, \dfrac, \tfrac12, unicode, sqrt(2), ...

The last of several counts. A tag or box that is opened and not closed was cut off: it gives no answer.

A completion may be long and hostile: every text is read in time proportional to its length
(`tests/faults/test_regex_growth.py`). Only `normalize`, for answers of at most 500 characters, is not.
"""

import re
from collections.abc import Iterator

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_PHRASE = re.compile(
    r"(?:\b(?:answer|option|choice)\s++is|\banswer\b\s*+\**+\s*+:)\s*+:?+\s*+\**+\s*+([^\n]*)", re.IGNORECASE
)
_ASIDE = re.compile(r",? (?:not|rather than|instead of|since|because|which)\b.*")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MATH_OPENS = re.compile(r"\$\$|(?<!\\)\$|\\\(|\\\[")
_MATH_CLOSES = {
    opened: re.compile(closed)
    for opened, closed in (("$$", r"\$\$"), ("$", r"(?<!\\)\$"), (r"\(", r"\\\)"), (r"\[", r"\\\]"))
}
_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])-\s?)?{_UNSIGNED}(?:\s*/\s*{_UNSIGNED})?")
_FUNCTIONS = ("sqrt", "pi", "sin", "cos", "tan", "log", "ln", "exp", "infinity", "inf", "det", "max", "min")

_COMMANDS = ("text", "textbf", "textit", "textrm", "mathrm", "mathbf", "mathit", "mbox", "operatorname")
_TEXT = re.compile(rf"\\(?:{'|'.join(_COMMANDS)})\s*\{{([^{{}}]*)\}}")
_WORDS = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}
_WORDS |= {"nine": 9, "ten": 10, "eleven": 11, "twelve": 12}
_UNICODE = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{INFINITY}": r"\infty ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{UNION}": r"\cup ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{DEGREE SIGN}": r"^\circ ",
    "\N{EURO SIGN}": " euro ",
    "\N{NO-BREAK SPACE}": " ",
    "\N{EMPTY SET}": r"\emptyset ",
}
_SPELLINGS = [
    (r"\\(?:left|right|displaystyle|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])\.?", ""),
    (r"(?<=\d)(?:\\[,!]|\{,\}\\?!?|,\\!)\s*(?=\d{3}(?!\d))", ","),
    (r"(?<!\\)\\[,;:!> ]|~|\\q?quad", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"\\frac(\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w)", r"\\frac\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    ("\N{SQUARE ROOT}" + r"\s*\(?(\w+)\)?", r"\\sqrt{\1}"),
    (r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<!\\)\b(pi|sin|cos|tan|cot|ln|log)\b", r"\\\1"),
    (r"(?i)(?<=\d) ?([ap])\.? ?m\b\.?", r" \1m"),
    (r"(?i)\bsq\.", "sq"),
    (r"(?i)^(yes|no)\b[,.;].*", r"\1"),
    (r"(?<=\d) thousand\b", r" \\cdot 10^{3}"),
    (r"(?<=\d) million\b", r" \\cdot 10^{6}"),
    (r"(?<=\d) billion\b", r" \\cdot 10^{9}"),
    (r"(?<!\\)\binf(?:ini)?ty\b|(?<!\\)\binfinity\b", r"\\infty"),
    (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|\\degree", r"^\\circ"),
    (r"\\(?:leqslant|leq)(?![a-z])|<=", r"\\le "),
    (r"\\(?:geqslant|geq)(?![a-z])|>=", r"\\ge "),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    (r"\\cdot(?![a-z])|\\times(?![a-z])|(?<!\*)\*(?!\*)", r" \\cdot "),
    (r"\*\*", "^"),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\%", "%"),
    (r"\\\$", "$"),
    (r"\s+", " "),
]
_PATTERNS = [(re.compile(pattern), spelling) for pattern, spelling in _SPELLINGS]


def final_answers(text: str) -> list[str]:
    """Return candidates for the text's answer, best first; empty if it has none."""
    tagged = list(between(text, "<answer>", "</answer>"))
    if "<answer>" in text:
        is_cut_off = "<answer>" in text[text.rfind("</answer>") + 1 :]
        return [] if is_cut_off else final_answers(tagged[-1])
    if _BOX.search(text):
        boxed = last_boxed(text)
        return [boxed] if boxed else []
    phrases = _ANSWER_PHRASE.findall(text)
    if phrases and phrases[-1].strip(" .*"):
        text = _ASIDE.sub("", phrases[-1])
    formulas = list(_formulas(text))
    if formulas:
        return [formulas[-1]]
    whole = text.strip().strip("*").strip()
    if not _is_prose(whole):
        return [whole] if whole else []
    numbers = _NUMBER.findall(whole.replace("\N{MINUS SIGN}", "-"))
    return [whole, numbers[-1]] if numbers else [whole]


def between(text: str, opened: str, closed: str) -> Iterator[str]:
    """Yield what stands between each of these and the next of those."""
    start = text.find(opened)
    while start >= 0 and (end := text.find(closed, start + len(opened))) >= 0:
        yield text[start + len(opened) : end]
        start = text.find(opened, end + len(closed))


def _formulas(text: str) -> Iterator[str]:
    """Yield the formulas between dollars or LaTeX's brackets, none of them empty."""
    place, never_closed = 0, set()
    while opening := _MATH_OPENS.search(text, place):
        place = opening.start() + 1
        is_escaped = text[opening.start() - 1 : opening.start()] == "\\"
        for opened in ("$$", "$")[: 2 - is_escaped] if opening[0] == "$$" else (opening[0],):  # $$x$ is $x
            start = opening.start() + len(opened)
            end = None if opened in never_closed else _MATH_CLOSES[opened].search(text, start + 1)
            if end is not None:
                yield text[start : end.start()]
                place = end.end()
                break
            never_closed.add(opened)


def gold_answer(text: str) -> str:
    """Return the reference answer: data sets write it alone, after ####, or in a solution's box."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return (last_boxed(text) or "" if _BOX.search(text) else text).strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, with braces matched; None if it is never closed."""
    start = [match.end() for match in _BOX.finditer(text)][-1]
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        if depth == 0:
            return text[start:end].strip()
    return None


def _is_prose(text: str) -> bool:
    """True if a word precedes the first number; names of functions do not count."""
    words = re.findall(r"(?<![\\{])\b[A-Za-z]{2,}", re.split(r"\d", text)[0])
    return any(word not in _FUNCTIONS for word in words) and any(c.isdigit() for c in text)


def normalize(text: str) -> str:
    r"""Return the text in one spelling: `\dfrac12\text{ cm}` becomes `\frac{1}{2} cm`."""
    for character, spelling in _UNICODE.items():
        text = text.replace(character, spelling)
    text = text.strip()
    if matched := _FORMULA.fullmatch(text):
        text = next(part for part in matched.groups() if part)
    while _TEXT.search(text):
        text = _TEXT.sub(r" \1 ", text)
    for pattern, spelling in _PATTERNS:
        text = pattern.sub(spelling, text)
    text = text.strip().rstrip(".,;").strip()
    return str(_WORDS.get(text.casefold(), text))
