"""Read the messages of a row to imitate, in the spelling of the tool that wrote them.

    OpenAI      role, content (a text or a list of text parts), tool_calls or function_call, weight 0 or 1
    ShareGPT    from, value; function_call and observation are the call of a tool and its result
    Axolotl     train or training, true or false, per message
    LLaMA-Factory, Alpaca, Dolly    columns of one exchange, with history, system and tools

tools, arguments and lists of messages may be JSON texts. What a chat template would be given in another form
than `qerl serve` gives it is refused, by BadRow.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qerl.tasks.rows.messages import BadRow, from_json, join_text_parts, read_calls, read_variables

Row = Mapping[str, Any]
Message = dict[str, Any]

CHAT_COLUMNS = ("system", "system_prompt", "tools", "functions", "chat_template_kwargs")
"""Columns that any conversation may have beside its own."""
EXCHANGES = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "answer"),
    ("query", "response"),
    ("problem", "solution"),
)
"""Pairs of columns with what the user says and what the assistant answers."""
EXCHANGE_COLUMNS = ("input", "context", "history")
_FROM = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    "system": "system",
}
_FLAGS = ("weight", "train", "training", "trainable", "loss")
_UNKNOWN_FLAGS = (
    "train_detail",
    "training_detail",
    "mask",
    "masked",
    "loss_mask",
    "loss_scale",
    "loss_weight",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChatRow:
    """Messages, and which of them a row says are learned."""

    messages: list[Message]
    is_learned: list[bool | None]
    """Flag of each message; None if the row has none."""
    first: int = 0
    """Messages before this one are a prompt and not learned."""
    variables: dict[str, Any]
    """Further variables of the chat template, such as tools."""


def read_chat(row: Row) -> ChatRow:
    return _conversation(row, from_json(row["messages"], "messages"))


def read_sharegpt(row: Row) -> ChatRow:
    turns = from_json(row["conversations"], "conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("conversations is not a list of messages")
    return _conversation(row, [_renamed(turn, number) for number, turn in enumerate(turns, 1)])


def read_prompt_messages(row: Row) -> ChatRow:
    """Read a list of messages and the messages that complete it."""
    prompt, completion = as_messages(row["prompt"]), as_messages(row["completion"])
    if not prompt or not completion:
        raise BadRow(f"its {'completion' if prompt else 'prompt'} is empty")
    return _conversation(row, [*prompt, *completion], len(prompt))


def read_exchange(row: Row, question_column: str, answer_column: str) -> ChatRow:
    """Read a question, with what belongs to it, and its answer; history has the exchanges before."""
    texts = [_text(row, column) for column in (question_column, "input", "context")]
    question = "\n\n".join(text for text in texts if text)
    if not question:
        raise BadRow(f"its {question_column} is empty")
    pairs = from_json(row.get("history") or [], "history")
    is_whole = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not is_whole:
        raise BadRow("history is not a list of pairs of a question and its answer")
    pairs = [*pairs, [question, _text(row, answer_column)]]
    roles = ("user", "assistant")
    messages = [{"role": r, "content": text} for pair in pairs for r, text in zip(roles, pair, strict=True)]
    return _conversation(row, messages)


def as_messages(value: Any) -> list[Any] | None:
    """Return the value if it is a list, or a JSON text of a list of messages; else None."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            listed = from_json(value, "messages")
        except BadRow:
            return None
        return listed if all(isinstance(each, dict) and "role" in each for each in listed) else None
    return value if isinstance(value, list) else None


def messages_of(messages: Any) -> list[Message]:
    """Return the messages in the form that chat templates take, without empty entries; raise BadRow for one
    without role or content."""
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages is not a list of messages")
    cleaned = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"message {number} has no role")
        fields = {name: value for name, value in message.items() if value is not None}
        if "function_call" in fields:
            if "tool_calls" in fields:
                raise BadRow(f"message {number} has both function_call and tool_calls")
            fields["tool_calls"] = [fields.pop("function_call")]
        if fields.get("tool_calls"):
            fields["tool_calls"] = read_calls(fields["tool_calls"], f"message {number}")
        if "content" not in fields and not fields.get("tool_calls"):
            raise BadRow(f"message {number} has no content")
        cleaned.append({**fields, "content": _content(fields.get("content", ""), number)})
    return cleaned


def _conversation(row: Row, messages: Any, first: int = 0) -> ChatRow:
    cleaned = messages_of(messages)
    is_learned = [_take_flag(message, number) for number, message in enumerate(cleaned, 1)]
    system = _system(row)
    if system and cleaned[0]["role"] in ("system", "developer"):
        if cleaned[0]["content"] != system:
            raise BadRow("its system column and its system message differ")
    elif system:
        cleaned, is_learned = [{"role": "system", "content": system}, *cleaned], [None, *is_learned]
        first += first > 0
    variables = read_variables(row, ("tools", "functions"))
    return ChatRow(messages=cleaned, is_learned=is_learned, first=first, variables=variables)


def _system(row: Row) -> str:
    texts = {text for column in ("system", "system_prompt") if (text := _text(row, column))}
    if len(texts) > 1:
        raise BadRow("its columns system and system_prompt differ")
    return next(iter(texts), "")


def _renamed(turn: Message, number: int) -> Message:
    """Return ShareGPT's turn under OpenAI's names."""
    fields = {name: value for name, value in turn.items() if value is not None}
    if "from" in fields and str(fields["from"]) not in _FROM:
        raise BadRow(f"message {number} is from {fields['from']!a}; known are {', '.join(_FROM)}")
    for theirs, ours in (("from", "role"), ("value", "content")):
        if theirs in fields and fields.setdefault(ours, fields[theirs]) != fields[theirs]:
            raise BadRow(f"message {number} has both {theirs} and {ours}")
        fields.pop(theirs, None)
    speaker = fields.get("role")
    if speaker == "function_call":
        fields["tool_calls"] = fields.pop("content", None)
        if not fields["tool_calls"]:
            raise BadRow(f"message {number} is a function_call and empty")
    return fields | {"role": _FROM[speaker]} if isinstance(speaker, str) and speaker in _FROM else fields


def _take_flag(message: Message, number: int) -> bool | None:
    """Remove what the message says of its learning, and return it."""
    for name in _UNKNOWN_FLAGS:
        if name in message:
            raise BadRow(f"message {number} has {name}: say with weight, 0 or 1, which messages are learned")
    flags = {name: message.pop(name) for name in _FLAGS if name in message}
    for name, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise BadRow(f"{name} of message {number} is {value!a}; it must be 0 or 1")
    if len({bool(value) for value in flags.values()}) > 1:
        raise BadRow(f"{' and '.join(flags)} of message {number} differ")
    return next((bool(value) for value in flags.values()), None)


def _content(content: Any, number: int) -> str:
    where = f"the content of message {number}"
    if not isinstance(content, str | list):
        raise BadRow(f"{where} is not a text")
    return content if isinstance(content, str) else join_text_parts(content, where)


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{column} is not a text")
    return value or ""
