"""Describe tools to a model whose chat template does not, and find tool calls in an answer.

`call_forms` has the forms of calls. Text that looks like a call but is none, or calls a function that was
not offered, stays text.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qerl.errors import UserError
from qerl.serve.marked_text import NO_MARKERS, Markers, spelled, unmarked
from qerl.tasks.call_forms.form import CallForm, RawCall, Schemas, bare_calls, may_be_bare
from qerl.tasks.call_forms.hermes import HERMES

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HOW_TO_CALL = f'To call one, answer with {_OPEN}{{"name": NAME, "arguments": {{...}}}}{_CLOSE}'

_PARTS = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}  # with these, others may name arguments


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedCall:
    id: str
    name: str
    arguments: str
    """JSON."""

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCallStream:
    """Splits the marked text of one answer into text and calls; it waits where a call may have begun. Without
    names of functions all is text. A form's control token that is a special token is no text: its text, as
    an answer may quote it, opens no call."""

    def __init__(
        self,
        functions: Schemas | Collection[str],
        *,
        is_parallel: bool,
        prompt_T: Sequence[int] = (),
        form: CallForm = HERMES,
        markers: Markers = NO_MARKERS,
    ):
        """functions: names, or by name the schemas of their arguments. prompt_T: tokens of the prompt. The
        same calls after the same prompt have the same ids, so that an episode that is played again has the
        prompts of the first time, if its chat template shows ids."""
        self.num_calls = self.num_malformed = 0
        self._prompt = ",".join(map(str, prompt_T)).encode()
        self._schemas = functions if isinstance(functions, Mapping) else {name: {} for name in functions}
        self._is_parallel, self._form = is_parallel, form
        opens = tuple(map(markers.mark, form.opens))
        self._opens = tuple(each for each in opens if spelled(each) != each) or opens
        self._pending, self._blanks = "", ""
        self._has_text, self._is_segment_empty = False, True

    def add(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return the text and the calls that this piece completes."""
        if not self._schemas:
            return unmarked(text), []
        self._pending += text
        if not (self._has_text or self.num_calls) and may_be_bare(
            self._form, spelled(self._pending), self._schemas
        ):
            return "", []  # only its end tells
        out, calls = self._scan(is_end=False)
        held = max((num_shared(self._pending, each) for each in self._opens), default=0)
        if not any(each in self._pending for each in self._opens):
            end = len(self._pending) - held
            out, self._pending = out + self._text(self._pending[:end]), self._pending[end:]
        return out, calls

    def end(self) -> tuple[str, list[ParsedCall]]:
        """Return what is left once the answer is complete."""
        is_whole = not (self._has_text or self.num_calls)
        for text in dict.fromkeys((spelled(self._pending), unmarked(self._pending))):
            if is_whole and (parsed := self._checked(bare_calls(self._form, text))):
                self._pending = ""
                return "", parsed
        out, calls = self._scan(is_end=True)
        out, self._pending = out + self._text(self._pending), ""
        return out + ("" if self.num_calls else self._blanks), calls

    def _scan(self, *, is_end: bool) -> tuple[str, list[ParsedCall]]:
        """Read the calls that are complete; an incomplete one is the beginning of what is pending."""
        out, all_calls, opens = "", list[ParsedCall](), self._opens
        while starts := [(at, -len(each)) for each in opens if (at := self._pending.find(each)) >= 0]:
            start, negative_size = min(starts)
            end = start - negative_size
            reading = self._form.read(spelled(self._pending), end, self._schemas, is_end)
            if reading is None:
                out, self._pending = out + self._text(self._pending[:start]), self._pending[start:]
                break
            calls = self._checked(reading.calls)
            if calls:
                out += self._text(self._pending[:start])
                all_calls, end = all_calls + calls, reading.end
                self._blanks, self._is_segment_empty = "", True
            else:
                self.num_malformed += 1
                out += self._text(self._pending[:end])
            self._pending = self._pending[end:]
        return out, all_calls

    def _text(self, text: str) -> str:
        """Return the text without marks, and without blanks that are alone before, between or after calls."""
        text = unmarked(text)
        if self._is_segment_empty:
            text, self._blanks = self._blanks + text, ""
            if not text.strip():
                self._blanks, text = text, ""
        self._is_segment_empty &= not text
        self._has_text |= bool(text)
        return text

    def _checked(self, raw: Sequence[RawCall]) -> list[ParsedCall]:
        """Return the calls, or none if any part is not the call of an offered function."""
        calls = list[ParsedCall]()
        try:
            for each in raw:
                arguments = each.arguments
                if isinstance(arguments, str):
                    arguments = json.loads(arguments or "{}")
                if each.name not in self._schemas or not isinstance(arguments, dict):
                    return []
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                written.encode()  # a ValueError if it has a lone surrogate
                place = self.num_calls + len(calls)
                calls.append(ParsedCall(self._id(place, each.name, written), each.name, written))
        except (ValueError, TypeError, RecursionError):
            return []
        if not self._is_parallel:
            calls = calls[: max(1 - self.num_calls, 0)]
        self.num_calls += len(calls)
        return calls

    def _id(self, place: int, name: str, arguments: str) -> str:
        digest = hashlib.sha256(self._prompt)
        digest.update(json.dumps([place, name, arguments]).encode())
        size = self._form.num_id_characters
        return f"call_{digest.hexdigest()[:24]}" if size is None else digest.hexdigest()[:size]


def num_shared(text: str, start: str) -> int:
    """Return how many characters at the end of the text are the beginning of `start`, but not all of it."""
    return next((n for n in range(len(start) - 1, 0, -1) if text.endswith(start[:n])), 0)


def with_described_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages for a chat template that ignores tools: their JSON is in the system message, and
    earlier calls are in the text of their messages, in the form in which calls are found."""
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(["You can call these functions:", *functions, _HOW_TO_CALL])
    written = list(map(_with_written_calls, messages))
    if written[0]["role"] == "system":
        head = written.pop(0)
        text = f"{head['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *written]


def _with_written_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        f"{_OPEN}{json.dumps(each['function'], ensure_ascii=False)}{_CLOSE}"
        for each in message.get("tool_calls", ())
    ]
    return {**message, "content": "\n".join(filter(None, [message["content"], *calls]))}


def call_schema(functions: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the JSON schema of one call of one of these (name, schema of the arguments).

    A reference names a definition at the top of its schema, so the definitions become one table. Arguments
    that a schema does not name are not sampled unless it says that there may be others."""
    definitions: dict[str, dict[str, Any]] = {}
    for _, schema in functions:
        for kind in {"$defs", "definitions"} & schema.keys():
            for name, value in schema[kind].items():
                if definitions.setdefault(kind, {}).setdefault(name, value) != value:
                    raise UserError(f"two functions define {name!r} differently: rename one")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _closed(schema)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in functions
    ]
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | definitions


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    is_plain = "properties" in schema and not _PARTS & schema.keys()
    return {"additionalProperties": False, **schema} if is_plain else schema
