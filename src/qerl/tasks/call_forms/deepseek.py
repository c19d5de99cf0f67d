"""Calls of DeepSeek between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>, one after the other.

V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
         ```json
         {...}
         ```<｜tool▁call▁end｜>
V3.1     <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

import re

from qerl.tasks.call_forms.form import CallForm, named_reader

_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_NAME = r"[\w.:/-]++"
_HEAD = re.compile(
    rf"\s*+(?:{_BEGIN})?+\s*+(?:\w++{_SEP}({_NAME})\s*+```(?:json)?+|({_NAME}){_SEP})\s*+(?=\{{)"
)
_PART = re.compile(r"\s*+(?:<[^<>]*+>?+)?+\s*+[\w.:/-]*+(?:<[^<>]*+>?+)?+[\w.:/-]*+\s*+`{0,3}+\w*+\s*+")
_TAIL = re.compile(rf"(?:\s*+```)?+(?:\s*+{_END})?+(?:\s*+{_ALL_END})?+")
_PART_OF_TAIL = re.compile(r"\s*+`{0,3}+\s*+(?:<[^<>]*+>)?+\s*+(?:<[^<>]*+)?+")

DEEPSEEK = CallForm(
    name="deepseek",
    markers=(_BEGIN,),
    opens=(_ALL_BEGIN, _BEGIN),
    read=named_reader(_HEAD.match, _PART.fullmatch, _TAIL.match, _PART_OF_TAIL.fullmatch),
    controls=(_ALL_BEGIN, _BEGIN, _SEP, _END, _ALL_END),
)
