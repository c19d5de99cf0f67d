"""Turn rows to imitate into tokens, and say which of them are learned.

    messages            a chat: what the assistant says, each turn up to its stop token
    conversations       the same in ShareGPT's form: from, value
    segments            Axolotl's: texts, of which those with a true label are learned
    prompt, completion  two texts, or two lists of messages: the completion and its stop token
    text                every token after the first, and the stop token
    instruction, output and other exchanges (conversation.py): a chat of a question and its answer

A chat is rendered up to each assistant's turn and including it. The pieces are tokenized apart, as in
sampling, where the prompt is tokenized before the answer exists. Where a template rewrites earlier turns
(Qwen3 drops their reasoning), every turn becomes a demonstration of its own, with the conversation before it
as prompt. A column, a template variable or a key of a message that changes no text is counted.
"""

import dataclasses
import itertools
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.config.sft import SftConfig
from qerl.errors import UserError, quantity
from qerl.tasks.chat_tokens import encoded, quoted, unquoted
from qerl.tasks.rows.conversation import (
    CHAT_COLUMNS,
    EXCHANGE_COLUMNS,
    EXCHANGES,
    ChatRow,
    Message,
    Row,
    as_messages,
    read_chat,
    read_exchange,
    read_prompt_messages,
    read_sharegpt,
)
from qerl.tasks.rows.prompt import BadRow
from qerl.tasks.rows.table import RowTable
from qerl.tasks.rows.values import value_fault
from qerl.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import

_MAX_TRIALS = 16  # rows in which a key is looked for in the rendered text before it counts as unused


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
_Input = tuple[list[Message], Mapping[str, Any]]  # messages and variables of a template


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

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def key(self) -> bytes:
        """Equal for equal tokens."""
        return self.tokens_T.tobytes()

    @property
    def prompt_T(self) -> array:
        """The tokens before the first learned one."""
        return self.tokens_T[: self.learned_T.index(1)]

    def group(self, index: int) -> Group:
        """Return it as the only sample of its prompt: the learner's form."""
        return Group(prompt=self.prompt(index), samples_G=[self.sample()])

    def sample(self) -> Sample:
        """Return what follows the prompt as a sample with advantage 1. Tokens that are not learned are an
        environment's, and those after the last learned one are left out."""
        first, last = self.learned_T.index(1), self.learned_T.rindex(1)
        tokens_T, learned_T = self.tokens_T[first : last + 1].tolist(), self.learned_T[first : last + 1]
        spans, start = [], 0
        for is_learned, run in itertools.groupby(learned_T):
            length = len(list(run))
            spans += [] if is_learned else [range(start, start + length)]
            start += length
        return Sample(
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

    def prompt(self, index: int) -> Prompt:
        """Return what comes before the first learned token, for the sampler."""
        return Prompt(
            index=index,
            text=self.prompt_text,
            tokens_T=self.prompt_T.tolist(),
            messages=self.messages,
            columns={"answer": self.answer},
        )


class Demonstrator:
    """Makes the demonstrations of rows, and counts what it does to them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: SftConfig, stop_ids: frozenset[int]):
        self._tokenizer, self._config = tokenizer, config
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        texts = tokenizer.convert_ids_to_tokens(sorted(stop_ids))
        self._stop_texts = tuple(text for text in texts if text is not None)  # None: beyond the vocabulary
        self.num_cut = 0
        """Demonstrations longer than max_length."""
        self.num_split = 0
        """Rows whose template rewrites earlier turns."""
        self._unused: Counter[str] = Counter()
        self._tried: Counter[str] = Counter()
        self._seen: set[str] = set()

    @property
    def unused_columns(self) -> list[str]:
        """Return "source (12 rows)" of each column that is not used in rows with a value in it."""
        return [f"{name} ({quantity(count, 'row')})" for name, count in self._unused.most_common()]

    @property
    def left_out(self) -> list[str]:
        """Template variables and keys of messages that changed no rendered text: "name of user messages"."""
        return [name for name in self._tried if name not in self._seen]

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
        named_form = form_of(row, self._config.text_column)
        if named_form is None:
            raise BadRow(_lacking(row, self._config.text_column))
        form, columns = named_form
        made = [self._tokenized(*each) for each in FORMS[form](self, row, columns)]
        used = {*columns, *_further_columns(form, row)}
        self._unused.update(name for name, value in row.items() if name not in used and value not in EMPTY)
        learned = [each for each in made if any(each.learned_T)]
        if not learned:
            limit = self._config.max_length
            raise BadRow("has nothing to learn" + (f" in its first {limit} tokens" if limit else ""))
        return learned

    def chat(self, row: Row, _: Sequence[str]) -> list[Rendered]:
        return self._of_messages(read_chat(row))

    def sharegpt(self, row: Row, _: Sequence[str]) -> list[Rendered]:
        return self._of_messages(read_sharegpt(row))

    def exchange(self, row: Row, columns: Sequence[str]) -> list[Rendered]:
        return self._of_messages(read_exchange(row, *columns))

    def segments(self, row: Row, _: Sequence[str]) -> list[Rendered]:
        """Return the texts as they are: special tokens, also the stop token, are written in them."""
        learns_all, pieces = not self._config.assistant_only_loss, []
        segments = row["segments"]
        for number, segment in enumerate(segments if isinstance(segments, list) else [None], 1):
            if not isinstance(segment, dict) or segment.keys() != {"label", "text"}:
                raise BadRow(f"segment {number} is not an object with label and text, and no other keys")
            if not isinstance(segment["label"], bool) or not isinstance(segment["text"], str):
                raise BadRow(f"segment {number}: label must be true or false, and text a text")
            pieces.append(Piece(segment["text"], segment["label"] or learns_all))
        return [(pieces, None)]

    def pair(self, row: Row, _: Sequence[str]) -> list[Rendered]:
        if _has_messages(row):
            return self._of_messages(read_prompt_messages(row))
        prompt, completion = row["prompt"], row["completion"]
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise BadRow("prompt and completion are neither two texts nor two lists of messages")
        if not prompt:
            raise BadRow("its prompt is empty")
        learns_all = not self._config.assistant_only_loss
        is_ended = not self._is_ended(completion)
        pieces = [Piece(prompt, learns_all, is_plain=True), Piece(completion, True, is_ended=is_ended)]
        return [(pieces, None)]

    def text(self, row: Row, _: Sequence[str]) -> list[Rendered]:
        text = row[self._config.text_column]
        if not isinstance(text, str) or not text:
            raise BadRow(f"{self._config.text_column} is not a text")
        return [([Piece(text, True, is_plain=True, is_ended=not self._is_ended(text))], None)]

    def _is_ended(self, text: str) -> bool:
        """True if the text ends with the stop token already."""
        end = self._tokenizer.eos_token
        return isinstance(end, str) and text.endswith(end)

    def _of_messages(self, chat: ChatRow) -> list[Rendered]:
        """Return the pieces of a conversation."""
        messages, turns = chat.messages, self._turns(chat)
        marked, variables = messages, chat.variables
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
        self._look_for_parts(chat)
        first = next(i for i, is_learned in turns.items() if is_learned)
        pieces = self._joined(rendered, list(turns.values()))
        if pieces is not None:
            return [(pieces, messages[:first])]
        if not (self._config.assistant_only_loss or all(turns.values())):
            raise BadRow("weight 0 needs assistant_only_loss: the chat template rewrites earlier turns")
        self.num_split += 1
        alone = [
            (self._joined([pair], [True]), i) for pair, i in zip(rendered, turns, strict=True) if turns[i]
        ]
        return [(each, messages[:i]) for each, i in alone if each is not None]

    def _turns(self, chat: ChatRow) -> dict[int, bool]:
        """Return {2: True}: each assistant's turn that has messages before it, and whether it is learned."""
        turns, learns_all = {}, not self._config.assistant_only_loss
        for i, (message, flag) in enumerate(zip(chat.messages, chat.is_learned, strict=True)):
            if message["role"] == "assistant" and i >= max(chat.first, 1):
                turns[i] = flag is not False
            elif flag is not None and flag != learns_all:
                says = "is" if flag else "is not"
                raise BadRow(
                    f"message {i + 1} ({message['role']}) says that it {says} learned, which only an"
                    " assistant's turn after another message may say"
                )
        if not turns:
            raise BadRow("has no assistant's turn after another message")
        if not any(turns.values()):
            raise BadRow("has no assistant's turn that is learned: all have weight 0, or train false")
        return turns

    def _look_for_parts(self, chat: ChatRow) -> None:
        """Render without each variable and each further key of a message, until one changed the text."""
        messages = chat.messages
        for name in chat.variables:
            others = {key: value for key, value in chat.variables.items() if key != name}
            self._look_for(name, (messages, chat.variables), (messages, others))
        for i, message in enumerate(messages):
            for key in sorted(message.keys() - {"role", "tool_calls"}):
                without = {name: value for name, value in message.items() if name != key} | {"content": ""}
                if key != "content":
                    without["content"] = message["content"]
                elif not message["content"]:
                    continue
                with_calls = " with tool_calls" if message.get("tool_calls") else ""
                name, variables = f"{key} of {message['role']} messages{with_calls}", chat.variables
                self._look_for(name, (messages[: i + 1], variables), ([*messages[:i], without], variables))

    def _look_for(self, name: str, whole: _Input, reduced: _Input) -> None:
        if name in self._seen or self._tried[name] >= _MAX_TRIALS:
            return
        self._tried[name] += 1
        texts = []
        for messages, variables in (whole, reduced):
            try:
                texts.append(self._render(messages, messages[-1]["role"] != "assistant", variables))
            except BadRow:
                texts.append(None)
        if texts[0] is not None and texts[0] != texts[1]:
            self._seen.add(name)

    def _joined(self, rendered: list[tuple[str, str]], are_learned: list[bool]) -> list[Piece] | None:
        """Return the pieces of turns that follow each other; None if a later one has another beginning."""
        done, pieces = "", []
        learns_all = not self._config.assistant_only_loss
        for (before, after), is_learned in zip(rendered, are_learned, strict=True):
            if not before.startswith(done):
                return None
            reply = after[len(before) :]
            ends = [reply.rfind(stop) + len(stop) for stop in self._stop_texts if stop in reply]
            reply = reply[: max(ends)] if ends else reply
            pieces += [Piece(before[len(done) :], learns_all), Piece(reply, is_learned, is_ended=not ends)]
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
        first = next((i for i, piece in enumerate(pieces) if i and piece.is_learned), len(pieces))
        reply = "".join(piece.text for piece in pieces[first : first + 1])
        for stop in self._stop_texts:
            reply = reply.removesuffix(stop)
        return Demonstration(
            tokens_T=tokens_T[:limit],
            learned_T=bytes(learned_T[:limit]),
            prompt_text=unquoted("".join(piece.text for piece in pieces[:first])),
            answer=unquoted(reply),
            messages=messages,
        )


FORMS: dict[str, Callable[[Demonstrator, Row, Sequence[str]], list[Rendered]]] = {
    "messages": Demonstrator.chat,
    "conversations": Demonstrator.sharegpt,
    "segments": Demonstrator.segments,
    "completion": Demonstrator.pair,
    "text": Demonstrator.text,
    "exchange": Demonstrator.exchange,
}
"""By the name that `form_of` gives."""
EMPTY = (None, "", [], {})


def _columns_by_form(text_column: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return each form with the columns that it needs; the first of which a row has all is its form."""
    alone = [(name, (name,)) for name in ("messages", "conversations", "segments")]
    exchanges = [("exchange", pair) for pair in EXCHANGES]
    return [*alone, ("completion", ("prompt", "completion")), ("text", (text_column,)), *exchanges]


def form_of(row: Row, text_column: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the name in FORMS and the columns that tell it; None if a row lacks one of them in each form."""
    for form, columns in _columns_by_form(text_column):
        if all(row.get(column) is not None for column in columns):
            return form, columns
    return None


def _lacking(row: Row, text_column: str) -> str:
    """Return what keeps a row from having a form."""
    for _, columns in _columns_by_form(text_column):
        missing = [column for column in columns if row.get(column) is None]
        if len(missing) < len(columns):
            return f"has no {missing[0]}"
    return "is empty"


def _has_messages(row: Row) -> bool:
    """True if prompt and completion are lists of messages and not texts."""
    return as_messages(row["prompt"]) is not None and as_messages(row["completion"]) is not None


def _further_columns(form: str, row: Row) -> Sequence[str]:
    """Return the columns that a row of this form may have beside those that tell the form."""
    if form in ("segments", "text") or (form == "completion" and not _has_messages(row)):
        return ()
    return (*CHAT_COLUMNS, *EXCHANGE_COLUMNS) if form == "exchange" else CHAT_COLUMNS


def _called_names(message: Message) -> list[str]:
    """Return the names of the functions that an assistant's message calls."""
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls or () if isinstance(call, dict)]
    return [function["name"] for function in functions if isinstance(function.get("name"), str)]


_RENAME = " Rename two of them, for example to question and answer"


def check_columns(name: str, columns: Sequence[str], text_column: str, option: str = "--text-column") -> None:
    """Raise UserError if no row of a table with these columns can be learned from. option: where the user
    says text_column."""
    forms = _columns_by_form(text_column)
    if any(set(needed) <= set(columns) for _, needed in forms):
        return
    alone = [needed[0] for _, needed in forms if len(needed) == 1 and needed[0] != text_column]
    pairs = [" and ".join(needed) for _, needed in forms if len(needed) > 1]
    is_json = not name.endswith((".csv", ".parquet"))
    question, answer = (
        (f".[{json.dumps(c)}]" for c in columns) if len(columns) == 2 else (".QUESTION", ".ANSWER")
    )
    convert = (
        f'{{messages: [{{role: "user", content: {question}}}, {{role: "assistant", content: {answer}}}]}}'
    )
    raise UserError(
        f"{name}: rows to imitate need a column {', '.join(alone)} or {text_column} ({option}), or columns"
        f" {', '.join(pairs)}; its columns are {', '.join(columns)}."
        + (f" To convert them: jq -c '{convert}' ROWS.jsonl > chats.jsonl" if is_json else _RENAME)
    )
