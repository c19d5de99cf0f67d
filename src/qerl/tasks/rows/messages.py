"""Read the messages of a prompt, and what else its row gives to the chat template.

    role              any that the chat template takes
    content           a text, a list of text parts, or null beside tool_calls
    tool_calls        of an assistant: {"function": {"name", "arguments"}}, or the function alone; JSON texts
                      of it and of its arguments are read
    name, tool_call_id, reasoning_content, thinking    as they are
    columns           tools: a list of functions; chat_template_kwargs: an object

Another key of a message is refused by its name, unless it is null or empty.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from qerl.tasks.rows.values import value_fault

VARIABLES = ("tools", "chat_template_kwargs")
"""Columns for the chat template."""
_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content", "thinking")
_NEED_TEMPLATE = _KEYS[2:]


class BadRow(Exception):
    """A row that no prompt can be made of: `BadRow("'prompt' is missing")`."""


def read_messages(messages: Any, column: str) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them; raise BadRow for one that is not understood whole."""
    if not isinstance(messages, list):
        raise BadRow(f"{column} is {kind_of(messages)}, not a list of messages")
    if not messages:
        raise BadRow(f"{column} has no message")
    numbered = enumerate(messages, start=1)
    return [_read_message(message, f"message {number} of {column}") for number, message in numbered]


def read_variables(row: Mapping[str, Any], tool_columns: Sequence[str] = VARIABLES[:1]) -> dict[str, Any]:
    """Return the variables that the row's own columns give to the chat template; one of tool_columns may hold
    its functions."""
    columns = [name for name in tool_columns if row.get(name)]
    if len(columns) > 1:
        raise BadRow(f"has both {' and '.join(columns)}")
    variables = from_json(row.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(variables, dict):
        raise BadRow(f"chat_template_kwargs is {kind_of(variables)}, not an object")
    tools = [tool for name in columns for tool in _read_tools(row[name], name)]
    return variables | ({"tools": tools} if tools else {})


def join_text_parts(parts: Iterable[Any], where: str, unread: Collection[str] = ()) -> str:
    """Return the texts of {"type": "text", "text": ...} as one; raise BadRow for another part, or for a key
    that is neither null nor among the unread ones."""
    texts = []
    for part in parts:
        fields = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
        kind, text = fields.pop("type", None), fields.pop("text", None)
        if kind != "text" or not isinstance(text, str):
            raise BadRow(f"{where}: a part is not a text (type: {'none' if kind is None else kind!a})")
        if further := sorted(fields.keys() - unread):
            raise BadRow(f"{where}: a text part has {further[0]!a}, which is not supported")
        texts.append(text)
    return "".join(texts)


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls in the form that templates take: arguments is an object. A call and its arguments may
    be JSON texts."""
    calls = from_json(calls, f"{where}: the tool call")
    return [_read_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]


def from_json(value: Any, what: str) -> Any:
    """Return the value of a JSON text; another value as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadRow(f"{what} is a text that is not JSON") from None
    if (fault := value_fault({what: parsed})) is not None:
        raise BadRow(fault)
    return parsed


def check_rendered(text: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> None:
    """Raise BadRow if the chat template left out a function, called or offered."""
    called = (call for message in messages for call in message.get("tool_calls", ()))
    for what, items in (("tool_calls", called), ("tools", variables.get("tools", ()))):
        for name in map(_name_of, items):
            if name not in text:
                raise BadRow(f"the chat template leaves out {what}, such as {name}")


def check_plain(messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> None:
    """Raise BadRow for what messages without a chat template could not show."""
    keys = (key for message in messages for key in _NEED_TEMPLATE if key in message)
    for key in (*keys, *variables):
        raise BadRow(f"{key} needs a chat template, which the tokenizer does not have")


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {kind_of(message)}, not an object with role and content")
    fields = {key: value for key, value in message.items() if value is not None and value != []}
    if unknown := [key for key in fields if key not in _KEYS]:
        raise BadRow(f"{where} has {unknown[0]!a}, which is not used: remove it")
    if "tool_calls" in fields:
        fields["tool_calls"] = read_calls(fields["tool_calls"], where)
        fields.setdefault("content", "")
    for key in fields.keys() - {"content", "tool_calls"} | {"role"}:
        if not isinstance(fields.get(key), str):
            raise BadRow(f"{where}: {key} is {_kind_or_missing(fields.get(key))}, not a text")
    return fields | {"content": _read_content(message.get("content", fields.get("content")), fields, where)}


def _read_content(content: Any, fields: Mapping[str, Any], where: str) -> str:
    if content is None and "tool_calls" in fields:
        return ""
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise BadRow(f"{where}: content is {_kind_or_missing(content)}, not a text")
        return content
    return join_text_parts(content, f"content of {where}")


def _read_call(call: Any, where: str) -> dict[str, Any]:
    call = from_json(call, f"{where}: the tool call")
    name = _name_of(call)
    if not name:
        raise BadRow(f"{where}: a tool call has no function with a name")
    function = call.get("function", call)
    what = f"{where}: arguments of {name!a}"
    arguments = from_json(function.get("arguments", function.get("parameters")) or {}, what)
    if not isinstance(arguments, dict):
        raise BadRow(f"{what} is {kind_of(arguments)}, not an object")
    head = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
    return {"type": "function", **head, "function": {"name": name, "arguments": arguments}}


def _read_tools(tools: Any, column: str) -> list[dict[str, Any]]:
    """Return the functions in OpenAI's form."""
    tools = from_json(tools, column)
    tools = [from_json(tool, column) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(map(_name_of, tools)):
        raise BadRow(f"{column} is not a list of functions with names")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _name_of(tool: Any) -> str:
    """Return the name of a function, or of an object that has one; "" for anything else."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _kind_or_missing(value: Any) -> str:
    return "missing" if value is None else kind_of(value)


TEXT, NUMBER, LIST, MISSING = "a text", "a number", "a list", "missing"
_KINDS = {str: TEXT, list: LIST, int: NUMBER, float: NUMBER, type(None): MISSING}
_KINDS |= {bool: "true or false", dict: "an object"}


def kind_of(value: Any) -> str:
    """Return the word for a value's type, which also decides what a column holds."""
    if isinstance(value, float) and value != value:
        return MISSING
    return _KINDS.get(type(value), "a value of another type")
