"""[TOOL_CALLS][{"name": ..., "arguments": ...}], or [TOOL_CALLS]NAME[ARGS]{...} for each call: Mistral.

A list, or names with their objects, that are the whole answer are read without the tokens too.
"""

import re

from qerl.tasks.call_forms.form import CallForm, Reading, Schemas, json_reader, named_reader

_OPEN = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\w++)?+(?:\[ARGS\])?+\s*+(?=\{)")
_PART_OF_NAME = re.compile(r"\s*+[\w.:/-]*+\s*+(?:\[[A-Z_]*+\]?+\w*+)*+\s*+")
_list = json_reader(())
_named = named_reader(_NAME.match, _PART_OF_NAME.fullmatch)


def _read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
    read = _list if text[place:].lstrip()[:1] == "[" else _named
    return read(text, place, schemas, is_end)


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
