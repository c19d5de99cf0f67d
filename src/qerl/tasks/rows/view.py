"""Show rows as the model will see them, and find what is wrong with them as a set.

prompts           rows of `qerl train`: template, chat template, tokens
demonstrations    rows of `qerl sft`: the same, and which tokens are learned
preferences       rows of `qerl dpo`: the same of each completion

duplicates        rows with the same text, but for white space that separates no two words
too long          more tokens than a limit
leaks             training rows whose prompt is that of a held-out row, but for case and white space
"""

import dataclasses
import functools
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from qerl.config import SftConfig, TaskConfig
from qerl.tasks.chat_tokens import allow_special_tokens
from qerl.tasks.rows.demonstrations import Demonstrator, form_of
from qerl.tasks.rows.known_sets import with_known_columns
from qerl.tasks.rows.preferences import (
    PreferenceReader,
    check_preference_columns,
    has_pairs,
    has_preferences,
)
from qerl.tasks.rows.prompt import Renderer, set_template_date, set_template_variables
from qerl.tasks.rows.table import RowTable, open_rows

Kind = Literal["prompt", "sft", "dpo"]
_EMPTY = "its prompt is empty, which only an environment may add to"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowView:
    """A row, or one of its turns where these are learned apart."""

    place: str
    """line 7, or row 7."""
    tokens_T: tuple[int, ...]
    learned_T: bytes
    """1 for each token that is learned; empty for a prompt."""
    prompt: str
    """Text before the first learned token."""
    part: str = ""
    """Name of the completion in `qerl dpo`: chosen or rejected."""

    @property
    def name(self) -> str:
        """Return its place, with its part of the row."""
        return f"{self.place}, {self.part}" if self.part else self.place

    def parts(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
        """Yield the text of each run of tokens, and whether it is learned."""
        flags = self.learned_T or bytes(len(self.tokens_T))
        pairs = zip(self.tokens_T, flags, strict=True)
        for is_learned, run in itertools.groupby(pairs, key=lambda pair: bool(pair[1])):
            yield str(tokenizer.decode([token for token, _ in run])), is_learned


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TableView:
    """One table of rows, all of them read."""

    name: str
    num_rows: int
    rows: list[RowView]
    bad: list[str]
    """"line 7: has no prompt" of each row that cannot be used."""
    unused: list[str] = dataclasses.field(default_factory=list)
    """Columns, and parts of chats, of rows for `qerl sft` that are not used: "source (12 rows)"."""

    def duplicates(self, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
        """Return the places of rows with the same text, of which the same is learned, each group once."""
        places_by_text: dict[tuple[str, str], list[str]] = defaultdict(list)
        for row in self.rows:
            parts = list(row.parts(tokenizer))
            learned = "".join(text for text, is_learned in parts if is_learned)
            places_by_text[_words("".join(text for text, _ in parts)), _words(learned)].append(row.name)
        return [places for places in places_by_text.values() if len(places) > 1]

    def too_long(self, max_tokens: int) -> list[str]:
        return [row.name for row in self.rows if len(row.tokens_T) > max_tokens]


def view_rows(
    task: TaskConfig, sft: SftConfig, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], kind: str
) -> tuple[Kind, TableView, TableView | None]:
    """Read the rows of task.name and the held-out ones: those of held_out_split, or, of prompts, the last
    task.num_held_out of them. kind: prompt, sft, dpo, or auto: as the columns and first rows look."""
    rows, held_out = open_rows(task)
    set_template_variables(tokenizer, json.loads(task.chat_template_kwargs))
    allow_special_tokens(tokenizer, task.allow_special_tokens)
    set_template_date(tokenizer, task.chat_template_date)
    tables = [rows] if held_out is None else [rows, held_out]
    prompt_tables = [with_known_columns(table, task)[0] for table in tables]
    known: dict[str, Kind] = {"prompt": "prompt", "sft": "sft", "dpo": "dpo"}
    made = known[kind] if kind in known else _kind(prompt_tables[0], task, sft)
    if made == "dpo":
        is_paired = has_pairs(rows.columns)
        for table in tables:
            check_preference_columns(table.name, table.columns, is_paired=is_paired)
        reader = functools.partial(PreferenceReader, tokenizer, sft, stop_ids, is_paired=is_paired)
        views = [_preferences(table, reader()) for table in tables]
    elif made == "sft":
        views = [_demonstrations(table, Demonstrator(tokenizer, sft, stop_ids)) for table in tables]
    else:
        views = [_prompts(table, Renderer(task, table, tokenizer)) for table in prompt_tables]
    num = task.num_held_out_of(rows.num_rows)
    if held_out is None and made == "prompt" and 0 < num < len(views[0].rows):
        whole, first = views[0], len(views[0].rows) - num
        views = [
            dataclasses.replace(whole, rows=whole.rows[:first]),
            dataclasses.replace(whole, name="the last rows", rows=whole.rows[first:], bad=[]),
        ]
    return made, views[0], views[1] if len(views) > 1 else None


def leaks(train: TableView, held_out: TableView) -> list[tuple[str, str]]:
    """Return (place of a training row, place of the held-out row with its prompt)."""
    known = {_words(row.prompt.casefold()): row.place for row in held_out.rows}
    pairs = ((row.place, known.get(_words(row.prompt.casefold()))) for row in train.rows)
    return list(dict.fromkeys((place, other) for place, other in pairs if other is not None))


def _words(text: str) -> str:
    """Return the text without white space but for a space between two words: a chat template may put a token
    behind a space that ends a prompt."""
    return re.sub(r"(?<!\w) | (?!\w)", "", " ".join(text.split()))


def _kind(rows: RowTable, task: TaskConfig, sft: SftConfig) -> Kind:
    if has_preferences(rows.columns):
        return "dpo"
    has_prompt = rows.prompt_column in rows.columns
    for index in range(min(rows.num_rows, 100)):
        if index not in rows.faults and (form := form_of(rows.get(index), sft.text_column)) is not None:
            is_graded = form[0] == "exchange" and task.answer_column in rows.columns
            return "prompt" if is_graded or (has_prompt and form[0] in ("text", "exchange")) else "sft"
    return "prompt"


def _prompts(table: RowTable, renderer: Renderer) -> TableView:
    made, column = [], str(table.prompt_column)
    for index in range(table.num_rows):
        prompt = renderer.usable_prompt(index, index=index)
        if prompt is not None and column in renderer.columns and _is_empty(table.get(index).get(column)):
            renderer.faults[index] = _EMPTY
        elif prompt is not None:
            tokens_T = tuple(prompt.tokens_T)
            made.append(
                RowView(place=table.place(index), tokens_T=tokens_T, learned_T=b"", prompt=prompt.text)
            )
    bad = [f"{table.place(index)}: {fault}" for index, fault in sorted(renderer.faults.items())]
    return TableView(name=table.name, num_rows=table.num_rows, rows=made, bad=bad)


def _is_empty(content: Any) -> bool:
    """True for a text, or a conversation, of white space only."""
    texts = [message["content"] for message in content] if isinstance(content, list) else [content]
    return all(isinstance(text, str) and not text.strip() for text in texts)


def _demonstrations(table: RowTable, demonstrator: Demonstrator) -> TableView:
    made, bad = [], []
    for place, demonstrations, fault in demonstrator.read(table):
        bad += [] if fault is None else [f"{place}: {fault}"]
        for each in demonstrations:
            tokens_T, prompt = tuple(each.tokens_T), each.prompt_text
            made.append(RowView(place=place, tokens_T=tokens_T, learned_T=each.learned_T, prompt=prompt))
    unused = [*demonstrator.unused_columns, *demonstrator.left_out]
    return TableView(name=table.name, num_rows=table.num_rows, rows=made, bad=bad, unused=unused)


def _preferences(table: RowTable, reader: PreferenceReader) -> TableView:
    made, bad = [], []
    for place, preferences, fault in reader.read(table):
        bad += [] if fault is None else [f"{place}: {fault}"]
        completions = (
            pair for each in preferences for pair in zip(each.completions, each.is_chosen, strict=True)
        )
        for each, is_chosen in completions:
            made.append(
                RowView(
                    place=place,
                    tokens_T=tuple(each.tokens_T),
                    learned_T=each.learned_T,
                    prompt=each.prompt_text,
                    part="chosen" if is_chosen else "rejected",
                )
            )
    unused = [*reader.unused_columns, *reader.left_out]
    return TableView(name=table.name, num_rows=table.num_rows, rows=made, bad=bad, unused=unused)
