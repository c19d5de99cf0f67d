"""<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>: Qwen3.5, Qwen3-Coder."""

import re

from qerl.tasks.call_forms.form import (
    MALFORMED,
    CallForm,
    RawCall,
    Reading,
    Schemas,
    read_arguments,
    typed,
)
from qerl.tasks.call_forms.hermes import HERMES

_HEAD = re.compile(r"\s*+<function=([^>\n]++)>\s*+")
_NEXT = re.compile(r"\s*+(?:<parameter=([^>\n]++)>\n?|</function>\s*+</tool_call>)")
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*+(?:<parameter=|</function>\s*+</tool_call>))")


def _read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
    undecided = MALFORMED if is_end else None
    head = _HEAD.match(text, place)
    if head is None:
        start = text[place:].lstrip()
        is_open = "<function=".startswith(start[:10]) and ">" not in start and "\n" not in start
        return undecided if is_open else MALFORMED
    if (tagged := read_arguments(text, head.end(), _NEXT.match, _VALUE_END.search)) is None:
        return undecided
    (pairs, end), schema = tagged, schemas.get(head[1], {})
    arguments = {key: typed(value, schema, key) for key, value in pairs}
    return Reading((RawCall(head[1], arguments),), end)


QWEN_XML = CallForm(
    name="qwen_xml",
    markers=("<function=",),
    opens=HERMES.opens,
    read=_read,
    controls=HERMES.controls,
)
