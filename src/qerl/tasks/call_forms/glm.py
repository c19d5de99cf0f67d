"""<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>: GLM-4.5 to 4.7.

GLM-4 writes NAME, a line's end and a JSON object, which are the whole answer.
"""

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

_HEAD = re.compile(r"\s*+([^<\s{]++)\s*+(?=<)")
_NEXT = re.compile(r"\s*+(?:<arg_key>(.*?)</arg_key>\s*+<arg_value>|</tool_call>)", re.DOTALL)
_VALUE_END = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>))")


def _read(text: str, place: int, schemas: Schemas, is_end: bool) -> Reading | None:
    undecided = MALFORMED if is_end else None
    head = _HEAD.match(text, place)
    if head is None:
        return undecided if re.fullmatch(r"\s*+[^<\s{]*+\s*+", text[place:]) else MALFORMED
    if (tagged := read_arguments(text, head.end(), _NEXT.match, _VALUE_END.search)) is None:
        return undecided
    (pairs, end), schema = tagged, schemas.get(head[1], {})
    arguments = {key.strip(): typed(value, schema, key.strip()) for key, value in pairs}
    return Reading((RawCall(head[1], arguments),), end)


_ARGUMENTS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
GLM45 = CallForm(
    name="glm45",
    markers=("<arg_key>",),
    opens=("<tool_call>",),
    read=_read,
    controls=(*HERMES.controls, *_ARGUMENTS),
)
GLM4 = CallForm(
    name="glm4",
    markers=("[gMASK]",),
    opens=HERMES.opens,
    read=HERMES.read,
    controls=HERMES.controls,
    is_bare=True,
    has_bare_names=True,
)
