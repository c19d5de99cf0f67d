"""<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}: gpt-oss.

Where a tokenizer has no such tokens: commentary to=functions.NAME json{...}.
"""

import re

from qerl.tasks.call_forms.form import CallForm, named_reader

TO = "commentary to=functions."
"""Before the name of the function."""
_STARTS = "<|start|>assistant<|channel|>", "<|channel|>", "assistant", ""
_HEAD = re.compile(r"([\w.-]++)\s*+(?:<\|constrain\|>)?+(?:json)?+\s*+(?:<\|message\|>)?+\s*+(?=\{)")
_PART = re.compile(r"[\w.-]*+\s*+[<|\w>]*+\s*+[<|\w>]*+\s*+")

HARMONY = CallForm(
    name="harmony",
    markers=("to=functions.",),
    opens=tuple(s + TO for s in _STARTS),
    read=named_reader(_HEAD.match, _PART.fullmatch),
    controls=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
)
