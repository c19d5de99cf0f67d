"""Describe tools to a model whose chat template does not, and find tool calls in an answer.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>    Hermes, Qwen: anywhere, any number
    {"name": ..., "parameters": {...}}                          Llama 3: the whole answer, divided by ;

Text that looks like a call but is none, or calls a function that was not offered, stays text.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from qerl.errors import UserError

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BETWEEN = re.compile(r"\s*+;?+\s*+")
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
    """Splits the text of one answer into text and calls; it waits where a call may have begun. Without names
    of functions all is text."""

    def __init__(self, names: set[str], *, is_parallel: bool, prompt_T: Sequence[int] = ()):
        """prompt_T: tokens of the prompt. The same calls after the same prompt have the same ids, so that an
        episode that is played again has the prompts of the first time, if its chat template shows ids."""
        self.num_calls = 0
        self._prompt = ",".join(map(str, prompt_T)).encode()
        self._names, self._is_parallel = names, is_parallel
        self._pending, self._has_text = "", False

    def add(self, text: str) -> tuple[str, list[ParsedCall]]:
        """Return the text and the calls that this piece completes."""
        if not self._names:
            return text, []
        self._pending += text
        if not self._has_text and self._pending.lstrip()[:1] in ("", "{"):
            return "", []  # perhaps a bare object; only its end tells
        parts, calls, place = [], [], 0
        while (start := self._pending.find(_OPEN, place)) >= 0:
            parts.append(self._pending[place:start])
            place, close = start, self._pending.find(_CLOSE, start)
            if close < 0:
                break
            place = close + len(_CLOSE)
            parsed = self._parse(self._pending[start + len(_OPEN) : close])
            parts += [] if parsed else [self._pending[start:place]]
            calls += parsed
        out, self._pending = "".join(parts), self._pending[place:]
        if _OPEN not in self._pending:
            num_held = next((n for n in range(len(_OPEN) - 1, 0, -1) if self._pending.endswith(_OPEN[:n])), 0)
            end = len(self._pending) - num_held
            out, self._pending = out + self._pending[:end], self._pending[end:]
        return self._text(out), calls

    def end(self) -> tuple[str, list[ParsedCall]]:
        """Return what is left once the answer is complete."""
        rest, self._pending = self._pending, ""
        parsed = self._parse(rest.strip().removeprefix(_OPEN))
        if parsed:
            return "", parsed
        return self._text(rest) if self.num_calls else rest, []

    def _text(self, text: str) -> str:
        """Return the text without blanks around calls."""
        if self.num_calls or not self._has_text:
            text = text if text.strip() else ""
        self._has_text |= bool(text)
        return text

    def _parse(self, text: str) -> list[ParsedCall]:
        """Return the calls, or none if any part is not the call of an offered function."""
        calls, decoder, text, end = [], json.JSONDecoder(), text.strip(), 0
        try:
            while end < len(text):
                value, end = decoder.raw_decode(text, end)
                arguments = value.get("arguments", value.get("parameters", {}))
                if value["name"] not in self._names or not isinstance(arguments, dict):
                    return []
                written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                written.encode()  # a ValueError if it has a lone surrogate
                place = self.num_calls + len(calls)
                calls.append(ParsedCall(self._id(place, value["name"], written), value["name"], written))
                end = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        if not self._is_parallel:
            calls = calls[: max(1 - self.num_calls, 0)]
        self.num_calls += len(calls)
        return calls

    def _id(self, place: int, name: str, arguments: str) -> str:
        digest = hashlib.sha256(self._prompt)
        digest.update(json.dumps([place, name, arguments]).encode())
        return f"call_{digest.hexdigest()[:24]}"


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
