"""Turn rows to imitate into tokens, and say which of them are learned.

    messages            a chat: what the assistant says, each turn up to its stop token
    conversations       the same in ShareGPT's form: from, value
    prompt, completion  two texts, or two lists of messages: the completion and its stop token
    text                every token after the first, and the stop token

A chat is rendered up to each assistant's turn and including it. The pieces are tokenized apart, as in
sampling, where the prompt is tokenized before the answer exists. Where a template rewrites earlier turns
(Qwen3 drops their reasoning), every turn becomes a demonstration of its own, with the conversation before it
as prompt.
"""

import dataclasses
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.config.sft import SftConfig
from qerl.errors import UserError
from qerl.tasks.chat_tokens import encoded, quoted, unquoted
from qerl.tasks.prompt import BadRow
from qerl.tasks.row_values import value_fault
from qerl.tasks.rows import RowTable
from qerl.types import Group, Prompt, Sample

_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
Row = Mapping[str, Any]
Message = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a row's text."""

    text: str
    """With the marks of chat_tokens.py where it is of a chat."""
    is_learned: bool
    is_plain: bool = False
    """True if the tokenizer's own special tokens go before it, as before any text without a template."""
    is_ended: bool = False
    """True if the stop token follows."""


Rendered = tuple[list[Piece], list[Message] | None]
"""The pieces of a demonstration, and the conversation before its first learned turn."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """The tokens of one row, or of one of its turns."""

    tokens_T: array
    learned_T: bytes
    """1 for each token that is learned, else 0; never for the first one."""
    prompt_text: str
    answer: str
    """Text of the first learned turn."""
    messages: list[Message] | None
    """The conversation before the first learned turn; None without messages."""

    def group(self, index: int) -> Group:
        """Return it as a sample with advantage 1: the learner's form. Tokens that are not learned are an
        environment's, and those after the last learned one are left out."""
        first, last = self.learned_T.index(1), self.learned_T.rindex(1)
        tokens_T, learned_T = self.tokens_T[first : last + 1].tolist(), self.learned_T[first : last + 1]
        spans, start = [], 0
        for is_learned, run in itertools.groupby(learned_T):
            length = len(list(run))
            spans += [] if is_learned else [range(start, start + length)]
            start += length
        sample = Sample(
            tokens_T=tokens_T,
            logprobs_T=[0.0] * sum(learned_T),
            text=self.answer,
            finish="stop",
            version=0,
            reward=1.0,
            advantage=1.0,
            environment_spans=tuple(spans),
            is_demonstration=True,
        )
        return Group(prompt=self.prompt(index), samples_G=[sample])

    def prompt(self, index: int) -> Prompt:
        """Return what comes before the first learned token, for the sampler."""
        return Prompt(
            index=index,
            text=self.prompt_text,
            tokens_T=self.tokens_T[: self.learned_T.index(1)].tolist(),
            messages=self.messages,
            columns={"answer": self.answer},
        )


class Demonstrator:
    """Makes the demonstrations of rows, and counts what it does to them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SftConfig, stop_ids: frozenset[int]):
        self._tokenizer, self._config = tokenizer, config
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        texts = tokenizer.convert_ids_to_tokens(sorted(stop_ids))
        self._stop_texts = tuple(text for text in texts if text is not None)  # None: beyond the vocabulary
        self.num_cut = 0
        """Demonstrations longer than max_length."""
        self.num_split = 0
        """Rows whose template rewrites earlier turns."""

    def read(self, table: RowTable) -> Iterator[tuple[str, list[Demonstration], str | None]]:
        """Yield (line 7, its demonstrations, what is wrong with it) of each row of a table."""
        for index in range(table.num_rows):
            try:
                if index in table.faults:
                    raise BadRow(table.faults[index])
                yield table.place(index), self.demonstrations(table.get(index)), None
            except BadRow as fault:
                yield table.place(index), [], str(fault)

    def demonstrations(self, row: Row) -> list[Demonstration]:
        """Return those of a row, one but for templates that rewrite earlier turns; raise BadRow."""
        if (fault := value_fault(row)) is not None:
            raise BadRow(fault)
        form = form_of(row, self._config.text_column)
        if form is None:
            raise BadRow("is empty")
        made = [self._tokenized(*each) for each in FORMS[form](self, row)]
        learned = [each for each in made if any(each.learned_T)]
        if not learned:
            limit = self._config.max_length
            raise BadRow("has nothing to learn" + (f" in its first {limit} tokens" if limit else ""))
        return learned

    def chat(self, row: Row) -> list[Rendered]:
        return self._of_messages(messages_of(row["messages"]), 0, row)

    def sharegpt(self, row: Row) -> list[Rendered]:
        turns = row["conversations"]
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadRow("conversations is not a list of messages")
        roles = (_ROLES.get(str(turn.get("from")), turn.get("from")) for turn in turns)
        named = [
            turn if "role" in turn else {"role": role, "content": turn.get("value")}
            for turn, role in zip(turns, roles, strict=True)
        ]
        return self._of_messages(messages_of(named), 0, row)

    def pair(self, row: Row) -> list[Rendered]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            before = messages_of(prompt)
            return self._of_messages([*before, *messages_of(completion)], len(before), row)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise BadRow("prompt and completion are neither two texts nor two lists of messages")
        if not prompt:
            raise BadRow("its prompt is empty")
        learns_all = not self._config.assistant_only_loss
        is_ended = not self._is_ended(completion)
        pieces = [Piece(prompt, learns_all, is_plain=True), Piece(completion, True, is_ended=is_ended)]
        return [(pieces, None)]

    def text(self, row: Row) -> list[Rendered]:
        text = row[self._config.text_column]
        if not isinstance(text, str) or not text:
            raise BadRow(f"{self._config.text_column} is not a text")
        return [([Piece(text, True, is_plain=True, is_ended=not self._is_ended(text))], None)]

    def _is_ended(self, text: str) -> bool:
        """True if the text ends with the stop token already."""
        end = self._tokenizer.eos_token
        return isinstance(end, str) and text.endswith(end)

    def _of_messages(self, messages: list[Message], first: int, row: Row) -> list[Rendered]:
        """Return the pieces of a conversation whose turns from `first` on are learned."""
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= max(first, 1)]
        if not turns:
            raise BadRow("has no assistant's turn after another message")
        variables = {"tools": row["tools"]} if row.get("tools") else {}
        marked = messages
        if not self._config.allow_special_tokens:
            marked, variables = quoted(self._tokenizer, (messages, variables))
        rendered = [
            (self._render(marked[:i], True, variables), self._render(marked[: i + 1], False, variables))
            for i in turns
        ]
        for i, (before, after) in zip(turns, rendered, strict=True):
            if not all(name in after[len(before) :] for name in _called_names(marked[i])):
                raise BadRow(f"the chat template leaves out the tool_calls of message {i + 1}")
            if not after.startswith(before):
                raise BadRow("the chat template does not render an assistant's turn after its own opening")
        starts = messages[: turns[0]]
        pieces = self._joined(rendered)
        if pieces is not None:
            return [(pieces, starts)]
        self.num_split += 1
        alone = [self._joined([pair]) for pair in rendered]
        return [(each, messages[:i]) for each, i in zip(alone, turns, strict=True) if each is not None]

    def _joined(self, rendered: list[tuple[str, str]]) -> list[Piece] | None:
        """Return the pieces of turns that follow each other; None if a later one has another beginning."""
        done, pieces = "", []
        learns_all = not self._config.assistant_only_loss
        for before, after in rendered:
            if not before.startswith(done):
                return None
            reply = after[len(before) :]
            ends = [reply.rfind(stop) + len(stop) for stop in self._stop_texts if stop in reply]
            reply = reply[: max(ends)] if ends else reply
            pieces += [Piece(before[len(done) :], learns_all), Piece(reply, True, is_ended=not ends)]
            done = before + reply
        return pieces

    def _render(self, messages: list[Message], opens_turn: bool, variables: Mapping[str, Any]) -> str:
        if not self._tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages) + ("\n\n" if opens_turn else "")
        try:
            options = {"tokenize": False, "add_generation_prompt": opens_turn, **variables}
            text = self._tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template is a program and may raise anything
            raise BadRow(f"the chat template rejects it: {' '.join(str(error).split())}") from error
        assert isinstance(text, str)
        return text

    def _tokenized(self, pieces: list[Piece], messages: list[Message] | None) -> Demonstration:
        tokens_T, learned_T = array("q"), bytearray()
        for piece in pieces:
            ids: list[Any] = encoded(self._tokenizer, piece.text, with_special_tokens=piece.is_plain)
            ids += self._end if piece.is_ended else []
            tokens_T.extend(ids)
            learned_T += bytes([piece.is_learned]) * len(ids)
        limit = self._config.max_length
        self.num_cut += limit is not None and len(tokens_T) > limit
        learned_T[:1] = b"\0" * min(1, len(learned_T))  # nothing predicts the first token
        reply = next((piece.text for piece in pieces[1:] if piece.is_learned), "")
        for stop in self._stop_texts:
            reply = reply.removesuffix(stop)
        return Demonstration(
            tokens_T=tokens_T[:limit],
            learned_T=bytes(learned_T[:limit]),
            prompt_text=unquoted(pieces[0].text),
            answer=unquoted(reply),
            messages=messages,
        )


FORMS: dict[str, Callable[[Demonstrator, Row], list[Rendered]]] = {
    "messages": Demonstrator.chat,
    "conversations": Demonstrator.sharegpt,
    "completion": Demonstrator.pair,
    "text": Demonstrator.text,
}
"""By the column that tells the form."""


def form_of(row: Row, text_column: str) -> str | None:
    """Return the name in FORMS; None if the row has no such column, or an empty one."""
    columns = {"text": text_column}
    return next((form for form in FORMS if row.get(columns.get(form, form)) is not None), None)


def messages_of(messages: Any) -> list[Message]:
    """Return the messages without empty entries; raise BadRow for one without role or content."""
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages is not a list of messages")
    cleaned = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f"message {number} has no role")
        fields = {name: value for name, value in message.items() if value is not None}
        if not isinstance(fields.get("content", ""), str):
            raise BadRow(f"the content of message {number} is not a text")
        if "content" not in fields and not fields.get("tool_calls"):
            raise BadRow(f"message {number} has no content")
        cleaned.append({"content": "", **fields})
    return cleaned


def _called_names(message: Message) -> list[str]:
    """Return the names of the functions that an assistant's message calls."""
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls or () if isinstance(call, dict)]
    return [function["name"] for function in functions if isinstance(function.get("name"), str)]


def check_columns(name: str, columns: Sequence[str], text_column: str, option: str = "--text-column") -> None:
    """Raise UserError if no row of a table with these columns can be learned from. option: where the user
    says text_column."""
    has_pair = {"prompt", "completion"} <= set(columns)
    if not has_pair and not {"messages", "conversations", text_column} & set(columns):
        raise UserError(
            f"{name}: rows to imitate need a column messages, columns prompt and completion, or a column"
            f" {text_column} ({option}); its columns are {', '.join(columns)}"
        )
