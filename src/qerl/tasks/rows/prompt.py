"""Render a row as a prompt: template, messages, chat template, tokens.

    row --template--> user message --(+ system)--> messages --chat template--> text --> tokens

Braces in the template name columns. `{question}` also stands for the prompt column's string, so the default
template is that string unchanged. A prompt column with messages is the conversation itself, without template.
Without a chat template, or with task.chat messages, a text stays plain, with the special tokens that the
tokenizer adds to any text; the prompt then has messages only if the data set has. Control tokens written in a
plain text are read as such, those in a message are text (chat_tokens.py).

Most rows decide whether the prompt column holds texts, numbers or messages. A row that no prompt can be made
of is a BadRow, which the task leaves out.
"""

import datetime
import json
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.chat_tokens import encoded, quoted, unquoted
from qerl.tasks.rows.messages import (
    LIST,
    MISSING,
    NUMBER,
    TEXT,
    VARIABLES,
    BadRow,
    check_plain,
    check_rendered,
    kind_of,
    read_messages,
    read_variables,
)
from qerl.tasks.rows.table import RowTable
from qerl.tasks.rows.values import is_json, is_unicode, value_fault
from qerl.tasks.template_process import render_template
from qerl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import

_MARK = "QERL"  # placeholder for the messages of user and assistant
_USABLE = TEXT, NUMBER, LIST
_PLAIN_KEYS = {"role", "content"}


class Renderer:
    """Renders rows of one table; rejects a template that names a missing column when it is made."""

    def __init__(self, config: TaskConfig, rows: RowTable, tokenizer: "PreTrainedTokenizerBase"):
        self.rows, self._tokenizer = rows, tokenizer
        self.faults = dict(rows.faults)
        """The rows found to be bad so far, and why."""
        self._num_taken = 0
        self._template, self._system = config.template, config.system_prompt
        self._kind = prompt_kind(rows)
        self.has_messages = self._kind == LIST
        is_chat = config.chat == "all" or self.has_messages
        self._has_template = is_chat and bool(tokenizer.chat_template)
        self._required = prompt_columns(config, rows, self._kind)
        further = [name for name in VARIABLES if name in rows.columns] if self.has_messages else []
        self.columns = [*self._required, *further]
        """The columns that a prompt is made of."""
        self._shared_variables = json.loads(config.chat_template_kwargs).keys()
        self._accepted: set[tuple[Any, ...]] = set()

    def prompt(self, row_index: int, *, index: int) -> Prompt:
        """Return the prompt of a row, or raise UserError; index is its index in the task."""
        try:
            return self._render(row_index, index)
        except BadRow as fault:
            place = self.rows.place(row_index)
            raise UserError(f"{self.rows.name}: {place}: {fault}") from fault

    def usable_prompt(self, row_index: int, *, index: int) -> Prompt | None:
        """Return the prompt of a row; None for a bad row, whose fault is kept."""
        try:
            return self._render(row_index, index)
        except BadRow as fault:
            self.faults[row_index] = str(fault)
            return None

    def check(self, row_index: int, row: dict[str, Any]) -> None:
        """Record the fault of a bad row. A row is rendered only where the chat template may reject it, which
        depends mostly on the messages' roles."""
        if row_index not in self.faults:
            try:
                messages, variables = self._messages(row), self._variables(row)
                form = (*(message["role"] for message in messages), *variables)
                is_empty = not any(message["content"] for message in messages)
                has_calls = bool(variables) or any(message.keys() > _PLAIN_KEYS for message in messages)
                if is_empty or has_calls or form not in self._accepted:
                    self._tokens(messages, variables)
                    self._accepted.add(form)
            except BadRow as fault:
                self.faults[row_index] = str(fault)

    def take_faults(self) -> list[str]:
        """Return "line 7: <fault>" for each row that was found to be bad since the last call."""
        fresh = list(self.faults.items())[self._num_taken :]
        self._num_taken = len(self.faults)
        return [f"{self.rows.place(index)}: {fault}" for index, fault in fresh]

    def _render(self, row_index: int, index: int) -> Prompt:
        if row_index in self.faults:
            raise BadRow(self.faults[row_index])
        row = self.rows.get(row_index)
        messages = self._messages(row)
        text, tokens_T = self._tokens(messages, self._variables(row))
        others = {name: value for name, value in row.items() if name != self.rows.prompt_column}
        return Prompt(
            index=index,
            text=text,
            tokens_T=tokens_T,
            messages=messages if self._has_template or self.has_messages else None,
            columns={name: value for name, value in others.items() if is_json(value)},
        )

    def _variables(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the chat template's variables of the row itself, such as tools."""
        variables = read_variables(row) if self.has_messages else {}
        for name in self._shared_variables & variables.keys():
            raise BadRow(
                f"its chat_template_kwargs has {name}, which task.chat_template_kwargs has for all rows"
            )
        return variables

    def _messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the conversation that the row begins with."""
        if (fault := value_fault(row)) is not None:
            raise BadRow(fault)
        for column in self._required:
            if kind_of(row.get(column)) == MISSING:
                raise BadRow(f"has no {column}")
        content = row[self.rows.prompt_column] if self.rows.prompt_column in self.columns else None
        if self.has_messages:
            return self._with_system(read_messages(content, str(self.rows.prompt_column)))
        if content is not None and kind_of(content) != self._kind:
            raise BadRow(f"{self.rows.prompt_column} is {kind_of(content)}, not {self._kind}")
        return self._with_system([{"role": "user", "content": self._fill_template(row, content)}])

    def _tokens(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> tuple[str, list[int]]:
        try:
            if self._has_template:
                text, tokens_T = render_chat(self._tokenizer, messages, variables)
                check_rendered(text, messages, variables)
            else:
                check_plain(messages, variables)
                num_plain = 0 if self.has_messages else len(messages)
                text, tokens_T = join_messages(self._tokenizer, messages, num_plain)
        except UserError as error:
            raise BadRow(str(error)) from error
        if not tokens_T:
            raise BadRow("its prompt has no token")
        return text, tokens_T

    def _fill_template(self, row: dict[str, Any], content: Any) -> str:
        fields = row if content is None else {"question": content, **row}
        try:
            text = self._template.format_map(fields)
        except (ValueError, KeyError, IndexError, AttributeError, TypeError, RecursionError) as error:
            raise BadRow(f"task.template {self._template!r}: {type(error).__name__}: {error}") from error
        if not is_unicode(text):
            raise BadRow("its prompt is not valid Unicode")
        return text

    def _with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the data set's system message by the config's."""
        if self._system is None:
            return messages
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return [{"role": "system", "content": self._system}, *rest]


def prompt_kind(rows: RowTable) -> str:
    """Return the kind of value that most rows have as prompt, of those that a prompt can be made of."""
    kinds = Counter(map(kind_of, rows.values(rows.prompt_column) if rows.prompt_column else []))
    return next((kind for kind, _ in kinds.most_common() if kind in _USABLE), TEXT)


def prompt_columns(config: TaskConfig, rows: RowTable, kind: str) -> list[str]:
    """Return the columns without which no row is a prompt; raise UserError if the table lacks one. kind: that
    of prompt_kind."""
    return [str(rows.prompt_column)] if kind == LIST else _template_columns(config, rows)


def _template_columns(config: TaskConfig, rows: RowTable) -> list[str]:
    """Return the columns that the template uses."""
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
            named = f"{column!r}, which task.template names"
            hint = "" if column.isidentifier() else "; write {{ and }} for braces"
            if column == "question":  # the prompt column, by the name that any template may give it
                named, hint = repr(config.prompt_column), "; set task.prompt_column to one of them"
            there_are = f"(there are: {', '.join(rows.columns)})"
            raise UserError(f"{rows.name}: has no column {named} {there_are}{hint}")
    return columns


def set_template_variables(tokenizer: "PreTrainedTokenizerBase", variables: dict[str, Any]) -> None:
    """Define these variables at the beginning of the tokenizer's chat template."""
    template = tokenizer.chat_template
    if isinstance(template, dict):  # templates by name: transformers takes tool_use if there are tools
        template = template.get("tool_use" if "tools" in variables else "default") or template["default"]
    if variables and template:
        blocks = "".join(f"{{% set {name} = {_literal(value)} %}}" for name, value in variables.items())
        tokenizer.chat_template = f"{blocks}\n{template}"  # transformers drops a block's newline


def set_template_date(tokenizer: "PreTrainedTokenizerBase", day: str | None) -> None:
    """Let `strftime_now` of the tokenizer's chat template give this day, such as 2026-11-29, at midnight;
    None leaves it the time of each rendering. transformers hands no function to a template: it is a macro."""
    template = tokenizer.chat_template
    if day is None or not isinstance(template, str) or "strftime_now" not in template:
        return
    date = datetime.datetime.fromisoformat(day)
    codes = [f"%-{letter}" for letter in "dHIjmMSy"] + [f"%{letter}" for letter in string.ascii_letters]
    known = {code: text for code in codes if (text := date.strftime(code)) != code}
    steps = "".join(f" | replace({_literal(code)}, {_literal(text)})" for code, text in known.items())
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{steps} }}}}{{% endmacro %}}"
    tokenizer.chat_template = f"{macro}\n{template}"


def _literal(value: Any) -> str:
    """Return a JSON value as Jinja writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    max_chars: int | None = None,
) -> tuple[str, list[int]]:
    """Return (text, tokens) up to the start of the assistant's turn, or of the rest of its last message.

    variables: further ones of the template, such as tools. max_chars: raise TooLongError for a longer text,
    before its tokens are counted, which takes seconds for 4 MB."""
    if not tokenizer.chat_template:
        _check_chars(sum(len(message["content"]) for message in messages), max_chars)
        return join_messages(tokenizer, messages)
    marked = _render_marked(tokenizer, messages, variables)
    text = unquoted(marked)
    _check_chars(len(text), max_chars)
    return text, encoded(tokenizer, marked)


class TooLongError(UserError):
    """A prompt with more characters than its tokens may have."""


def _check_chars(num_chars: int, max_chars: int | None) -> None:
    if max_chars is not None and num_chars > max_chars:
        raise TooLongError(f"the prompt has {num_chars:,} characters; the limit is {max_chars:,}")


def _render_marked(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None,
) -> str:
    """Return the text of `render_chat` with the marks of chat_tokens.py."""
    goes_on = messages[-1]["role"] == "assistant"
    marked, variables = quoted(tokenizer, (list(messages), dict(variables or {})))
    try:
        return render_template(tokenizer, marked, continues_last=goes_on, variables=variables)
    except UserError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the tokenizer's chat template rejects messages of {roles}: {error}") from None


def chat_reply_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Mapping[str, Any]],
    ended_by: str,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the tokens between an assistant's turn and its next one, with these messages in between.

    ended_by: the special token, if any, that ended the policy's turn; it is not repeated. variables: further
    ones of the template, such as tools."""
    marker = _MARK
    while any(marker in str(message) for message in messages):
        marker += "_"
    opening = [{"role": "user", "content": marker}, {"role": "assistant", "content": marker}]
    _, mark, text = _render_marked(tokenizer, [*opening, *messages], variables).rpartition(marker)
    if not mark:
        raise UserError("the tokenizer's chat template leaves out the assistant's messages")
    return encoded(tokenizer, text.removeprefix(ended_by))


def special_end(tokenizer: "PreTrainedTokenizerBase", tokens_T: Sequence[int]) -> str:
    """Return the text of the last token if it is a special token, else an empty string."""
    last = list(tokens_T[-1:])
    is_text = tokenizer.decode(last, skip_special_tokens=True)
    return "" if is_text else str(tokenizer.decode(last))


def plain_reply_tokens(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]], ended_by: str
) -> list[int]:
    """Return these tokens without a chat template: messages separated by empty lines."""
    contents = quoted(tokenizer, [message["content"] for message in messages])
    return encoded(tokenizer, "\n\n".join(["", *contents, ""]))


def join_messages(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], num_plain: int = 0
) -> tuple[str, list[int]]:
    """Return (text, tokens) of the messages without their roles. num_plain: how many of them, from the first,
    are no messages but plain texts."""
    contents = [message["content"] for message in messages]
    marked = "\n\n".join([*contents[:num_plain], *quoted(tokenizer, contents[num_plain:])])
    return unquoted(marked), encoded(tokenizer, marked, with_special_tokens=True)
