"""<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}: gpt-oss.

Where a tokenizer has no such tokens: commentary to=functions.NAME json{...}.
"""

import re

from qerl.serve.call_forms.form import MALFORMED, CallForm, RawCall, Reading, Schemas, json_end

_TO = "commentary to=functions."
_STARTS = "<|start|>assistant<|channel|>", "<|channel|>", "assistant", ""
_HEAD = re.compile(r"([\w.-]++)\s*+(?:<\|constrain\|>)?+(?:json)?+\s*+(?:<\|message\|>)?+\s*+(?=\{)")
_PART = re.compile(r"[\w.-]*+\s*+[<|\w>]*+\s*+[<|\w>]*+\s*+")


def _read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
    head = _HEAD.match(text, place)
    if head is None:
        is_open = _PART.fullmatch(text, place) is not None
        return None if is_open and not is_end else MALFORMED
    end = json_end(text, head.end())
    if end is None:
        return MALFORMED if is_end else None
    return Reading((RawCall(head[1], text[head.end() : end]),), end)


HARMONY = CallForm(
    name="harmony",
    markers=("to=functions.",),
    opens=tuple(s + _TO for s in _STARTS),
    read=_read,
    controls=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
)
