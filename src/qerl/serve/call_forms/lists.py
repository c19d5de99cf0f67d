"""<|tool_call|>[{"name": ..., "arguments": {...}}]: Granite 3, and Phi-4-mini with <|/tool_call|> at the end.

Detokenizing may drop the control tokens; the list is then the whole answer.
"""

from qerl.serve.call_forms.form import CallForm, json_reader

_OPEN = "<|tool_call|>"
PHI4 = CallForm(
    name="phi4",
    markers=("<|/tool_call|>",),
    opens=(_OPEN,),
    read=json_reader(("<|/tool_call|>",)),
    is_bare=True,
)
GRANITE = CallForm(name="granite", markers=(_OPEN,), opens=(_OPEN,), read=json_reader(()), is_bare=True)
