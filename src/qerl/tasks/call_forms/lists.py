"""<|tool_call|>[{"name": ..., "arguments": {...}}]: Granite 3, and Phi-4-mini with <|/tool_call|> at the end.

A list that is the whole answer is read without the tokens too.
"""

from qerl.tasks.call_forms.form import CallForm, json_reader

_OPEN, _CLOSE = "<|tool_call|>", "<|/tool_call|>"
PHI4 = CallForm(
    name="phi4",
    markers=(_CLOSE,),
    opens=(_OPEN,),
    read=json_reader((_CLOSE,)),
    controls=(_OPEN, _CLOSE),
    is_bare=True,
)
GRANITE = CallForm(
    name="granite",
    markers=(_OPEN,),
    opens=(_OPEN,),
    read=json_reader(()),
    controls=(_OPEN,),
    is_bare=True,
)
