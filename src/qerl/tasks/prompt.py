"""Render a row as a prompt: template, messages, chat template, tokens.

    row --template--> user message --(+ system)--> messages --chat template--> text --> tokens

Braces in the template name columns. `{question}` also stands for the prompt column's string, so the default
template is that string unchanged. A prompt column with messages is the conversation itself, without template.
Without a chat template, or with task.chat messages, a text stays plain, with the special tokens that the
tokenizer adds to any text; the prompt then has messages only if the data set has.
"""

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.rows import RowTable
from qerl.types import Prompt

_MARK = "QERL"  # placeholder for the messages of user and assistant


class Renderer:
    """Renders rows of one table; rejects a template that names a missing column when it is made."""

    def __init__(self, config: TaskConfig, rows: RowTable, tokenizer: PreTrainedTokenizerBase):
        self.rows, self._tokenizer = rows, tokenizer
        self._template, self._system = config.template, config.system_prompt
        column = rows.prompt_column
        self.has_messages = column is not None and isinstance(rows.get(0)[column], list)
        is_chat = config.chat == "all" or self.has_messages
        self._has_template = is_chat and bool(tokenizer.chat_template)
        self.columns = [str(rows.prompt_column)] if self.has_messages else self._template_columns(config)
        """The columns that a prompt is made of."""
        for column in [] if self.has_messages else self.columns:
            if (index := rows.first_empty(column)) is not None:
                raise UserError(f"{rows.name}: row {index + 1} has no {column}")

    def _template_columns(self, config: TaskConfig) -> list[str]:
        """Return the columns that the template uses."""
        rows = self.rows
        try:
            fields = [name for _, name, _, _ in string.Formatter().parse(config.template) if name is not None]
        except ValueError as error:
            hint = "write {{ and }} for braces"
            raise UserError(f"task.template {config.template!r}: {error} ({hint})") from error
        names = dict.fromkeys(name.partition("[")[0].partition(".")[0] for name in fields)
        is_ambiguous = rows.prompt_column not in (None, "question") and "question" in rows.columns
        if is_ambiguous and "question" in names and rows.prompt_column not in names:
            raise UserError(
                f"task.template: {rows.name} has both {rows.prompt_column!r} and 'question';"
                f" name one of them, or set task.prompt_column to question"
            )
        aliases = {} if rows.prompt_column is None or is_ambiguous else {"question": rows.prompt_column}
        columns = [aliases.get(name, name) for name in names]
        for column in columns:
            if column not in rows.columns:
                hint = f", nor task.prompt_column {config.prompt_column!r}" if column == "question" else ""
                hint = hint or ("" if column.isidentifier() else "; write {{ and }} for braces")
                raise UserError(
                    f"task.template names {{{column}}}, not a column of {rows.name}{hint} "
                    f" (there are: {', '.join(rows.columns)})"
                )
        return columns

    def prompt(self, row_index: int, *, index: int) -> Prompt:
        """Return the prompt of a row; index is its index in the task."""
        rows, row = self.rows, self.rows.get(row_index)
        content = row[rows.prompt_column] if rows.prompt_column else None
        if self.has_messages:
            messages = self._with_system(_check_messages(content, f"{rows.name}: row {row_index + 1}"))
        else:
            if isinstance(content, list | dict):
                what = f"{rows.prompt_column} is a {type(content).__name__}, not a string"
                raise UserError(f"{rows.name}: row {row_index + 1}: {what}")
            messages = self._with_system([{"role": "user", "content": self._fill_template(row, content)}])
        render = render_chat if self._has_template else join_messages
        text, tokens_T = render(self._tokenizer, messages)
        others = {name: value for name, value in row.items() if name != rows.prompt_column}
        return Prompt(
            index=index,
            text=text,
            tokens_T=tokens_T,
            messages=messages if self._has_template or self.has_messages else None,
            columns={name: value for name, value in others.items() if _is_json(value)},
        )

    def _fill_template(self, row: dict[str, Any], content: Any) -> str:
        fields = row if content is None else {"question": content, **row}
        try:
            return self._template.format_map(fields)
        except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
            raise UserError(f"task.template {self._template!r}: {type(error).__name__}: {error}") from error

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Replace the data set's system message by the config's."""
        if self._system is None:
            return messages
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return [{"role": "system", "content": self._system}, *rest]


def set_template_variables(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> None:
    """Define these variables at the beginning of the tokenizer's chat template."""
    template = tokenizer.chat_template
    if isinstance(template, dict):  # templates by name: transformers takes tool_use if there are tools
        template = template.get("tool_use" if "tools" in variables else "default") or template["default"]
    if variables and template:
        blocks = "".join(f"{{% set {name} = {_literal(value)} %}}" for name, value in variables.items())
        tokenizer.chat_template = f"{blocks}\n{template}"  # transformers drops a block's newline


def _literal(value: Any) -> str:
    """Return a JSON value as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """Return (text, tokens) up to the start of the assistant's turn, or of the rest of its last message.

    variables: further ones of the template, such as tools."""
    if not tokenizer.chat_template:
        return join_messages(tokenizer, messages)
    goes_on = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **variables or {},
        )
    except Exception as error:  # a template is a program and may raise anything
        roles, reason = ", ".join(message["role"] for message in messages), " ".join(str(error).split())
        raise UserError(f"the tokenizer's chat template rejects messages of {roles}: {reason}") from error
    assert isinstance(text, str)
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def chat_reply_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], ended_by: str
) -> list[int]:
    """Return the tokens between an assistant's turn and its next one, with these messages in between.

    ended_by: the special token, if any, that ended the policy's turn; it is not repeated."""
    opening = [{"role": "user", "content": _MARK}, {"role": "assistant", "content": _MARK}]
    _, mark, text = render_chat(tokenizer, [*opening, *messages])[0].rpartition(_MARK)
    if not mark:
        raise UserError("the tokenizer's chat template leaves out the assistant's messages")
    return list(tokenizer(text.removeprefix(ended_by), add_special_tokens=False)["input_ids"])


def plain_reply_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], ended_by: str
) -> list[int]:
    """Return these tokens without a chat template: messages separated by empty lines."""
    text = "\n\n".join(["", *(message["content"] for message in messages), ""])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def join_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]
) -> tuple[str, list[int]]:
    """Return (text, tokens) of the messages without their roles."""
    text = "\n\n".join(message["content"] for message in messages)
    return text, list(tokenizer(text)["input_ids"])


def _check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    """Return the role and content of each message and drop other keys."""
    try:
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    except (TypeError, KeyError) as error:
        raise UserError(f"{where}: a message must have a role and a content") from error
    if not plain or not all(isinstance(text, str) for message in plain for text in message.values()):
        raise UserError(f"{where}: messages must not be empty, and role and content must be strings")
    return plain


def _is_json(value: Any) -> bool:
    """True if the value is JSON serializable; images, bytes and dates are not passed to rewards."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
