"""<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>: Gemma 4. A string stands between <|"|> and <|"|>.

FunctionGemma, a Gemma 3, writes <start_function_call>, <end_function_call> and <escape> in their places.
"""

import json
import re

from qerl.tasks.call_forms.form import MALFORMED, CallForm, RawCall, Reader, Reading, Schemas

_HEAD = re.compile(r"\s*+call:([\w.:/-]++)\s*+(?=\{)")
_PART_OF_HEAD = re.compile(r"\s*+(?:c|ca|cal|call|call:[\w.:/-]*+\s*+)?")
_VALUE = r"|([^\s{}\[\],:][^{}\[\],:]*+)(:?)"
_PARTS = re.compile(r'<\|"\|>.*?(?:<\|"\|>|\Z)|(<tool_call\|>)', re.DOTALL)
_VALUES = re.compile(r'<\|"\|>(.*?)<\|"\|>' + _VALUE, re.DOTALL)
_PARTS_3 = re.compile(r"<escape>.*?(?:<escape>|\Z)|(<end_function_call>)", re.DOTALL)
_VALUES_3 = re.compile(r"<escape>(.*?)<escape>" + _VALUE, re.DOTALL)
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def _reader(parts: re.Pattern[str], values: re.Pattern[str]) -> Reader:
    """parts: strings, and the end of a call. values: strings, and words or keys with their colons."""

    def as_json(part: re.Match[str]) -> str:
        string, word, colon = part.groups()
        if string is not None:
            return json.dumps(string)
        word = word.rstrip()
        return json.dumps(word) + colon if colon else _WORDS.get(word, word)

    def read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
        undecided = MALFORMED if is_end else None
        head = _HEAD.match(text, place)
        if head is None:
            return undecided if _PART_OF_HEAD.fullmatch(text, place) else MALFORMED
        end = next((part for part in parts.finditer(text, head.end()) if part[1]), None)
        if end is None:
            return undecided
        arguments = values.sub(as_json, text[head.end() : end.start()])
        return Reading((RawCall(head[1], arguments),), end.end())

    return read


def _form(name: str, open: str, quote: str, close: str, read: Reader) -> CallForm:
    return CallForm(name=name, markers=(open,), opens=(open,), read=read, controls=(open, quote, close))


GEMMA4 = _form("gemma4", "<|tool_call>", '<|"|>', "<tool_call|>", _reader(_PARTS, _VALUES))
FUNCTION_GEMMA = _form(
    "function_gemma",
    "<start_function_call>",
    "<escape>",
    "<end_function_call>",
    _reader(_PARTS_3, _VALUES_3),
)
