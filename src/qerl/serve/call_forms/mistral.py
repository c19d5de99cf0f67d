"""[TOOL_CALLS][{"name": ..., "arguments": ...}], or [TOOL_CALLS]NAME[ARGS]{...} for each call: Mistral.

A list, or names with their objects, that are the whole answer are read without the tokens too.
"""

import re

from qerl.serve.call_forms.form import MALFORMED, CallForm, RawCall, Reading, Schemas, json_end, json_reader

_OPEN = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\w++)?+(?:\[ARGS\])?+\s*+(?=\{)")
_PART_OF_NAME = re.compile(r"\s*+[\w.:/-]*+\s*+(?:\[[A-Z_]*+\]?+\w*+)*+\s*+")
_list = json_reader(())


def _read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
    if text[place:].lstrip()[:1] == "[":
        return _list(text, place, schemas, is_end)
    head = _NAME.match(text, place)
    if head is None:
        is_open = _PART_OF_NAME.fullmatch(text, place) is not None
        return None if is_open and not is_end else MALFORMED
    end = json_end(text, head.end())
    if end is None:
        return MALFORMED if is_end else None
    return Reading((RawCall(head[1], text[head.end() : end]),), end)


MISTRAL = CallForm(
    name="mistral",
    markers=(_OPEN,),
    opens=(_OPEN,),
    read=_read,
    controls=(_OPEN, "[ARGS]", "[CALL_ID]"),
    is_bare=True,
    has_bare_names=True,
    num_id_characters=9,
)
