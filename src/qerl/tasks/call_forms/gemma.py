"""<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>: Gemma 4. A string stands between <|"|> and <|"|>.

FunctionGemma, a Gemma 3, writes <start_function_call>, <end_function_call> and <escape> in their places.
"""

import json
import re

from qerl.tasks.call_forms.form import MALFORMED, CallForm, RawCall, Reader, Reading, Schemas

_HEAD = re.compile(r"\s*+call:([\w.:/-]++)\s*+(?=\{)")
_PART_OF_HEAD = re.compile(r"\s*+(?:c|ca|cal|call|call:[\w.:/-]*+\s*+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def _reader(quote: str, close: str) -> Reader:
    mark = re.escape(quote)
    parts = re.compile(rf"{mark}.*?(?:{mark}|\Z)|({re.escape(close)})", re.DOTALL)
    values = re.compile(rf"{mark}(.*?){mark}|([^\s{{}}\[\],:][^{{}}\[\],:]*?)\s*(:|(?=[,}}\]]))", re.DOTALL)

    def as_json(part: re.Match[str]) -> str:
        string, word, colon = part.groups()
        if string is not None or colon:
            return json.dumps(word if string is None else string) + (colon or "")
        return _WORDS.get(word, word)

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


def _form(name: str, open: str, quote: str, close: str) -> CallForm:
    return CallForm(
        name=name,
        markers=(open,),
        opens=(open,),
        read=_reader(quote, close),
        controls=(open, quote, close),
    )


GEMMA4 = _form("gemma4", "<|tool_call>", '<|"|>', "<tool_call|>")
FUNCTION_GEMMA = _form("function_gemma", "<start_function_call>", "<escape>", "<end_function_call>")
