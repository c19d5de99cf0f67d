"""Turn rows of preferences into prompts and completions, in TRL's columns.

    prompt, chosen, rejected       two completions of a prompt: texts, or lists of messages
    chosen, rejected               the same; their common beginning is the prompt
    prompt, completion, label      one completion, and whether it is a good one

A loss of pairs needs the first or the second form; a loss of single completions takes all three, of a pair
both completions one after the other. Prompt and completion become tokens as those of `qerl sft`
(demonstrations.py): what the assistant says in the completion is learned.
"""

import dataclasses
import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qerl.config.sft import SftConfig
from qerl.errors import UserError, quantity
from qerl.tasks.rows.conversation import CHAT_COLUMNS, Row, as_messages
from qerl.tasks.rows.demonstrations import EMPTY, Demonstration, Demonstrator
from qerl.tasks.rows.prompt import BadRow
from qerl.tasks.rows.table import RowTable
from qerl.types import Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import

_PAIR, _SINGLE = ("chosen", "rejected"), ("prompt", "completion", "label")


@dataclasses.dataclass(frozen=True, slots=True)
class Preference:
    """A pair, the chosen completion first, or a single completion, all of one prompt."""

    completions: tuple[Demonstration, ...]
    is_chosen: tuple[bool, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest completion with its prompt."""
        return max(each.num_tokens for each in self.completions)

    @property
    def key(self) -> bytes:
        """Equal for equal preferences."""
        return b"\0".join(part for each in self.completions for part in (each.key, each.learned_T))

    @property
    def prompt_T(self) -> array:
        return self.completions[0].prompt_T

    def prompt(self, index: int) -> Prompt:
        return self.completions[0].prompt(index)

    def group(self, index: int) -> Group:
        """Return the completions as samples of one prompt, with advantage 1."""
        samples = [
            dataclasses.replace(each.sample(), sample_index=i) for i, each in enumerate(self.completions)
        ]
        return Group(prompt=self.prompt(index), samples_G=samples)

    def with_completion_of(self, other: "Preference", index: int) -> Group:
        """Return this prompt with the other one's completion, both as they are."""
        return Group(prompt=self.prompt(index), samples_G=[other.completions[0].sample()])


class PreferenceReader:
    """Makes the preferences of rows, and counts what it does to them; the interface of a Demonstrator."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: SftConfig,
        stop_ids: frozenset[int],
        *,
        is_paired: bool,
    ):
        self._demonstrator = Demonstrator(tokenizer, config, stop_ids)
        self._is_paired = is_paired
        self._unused: Counter[str] = Counter()

    @property
    def num_cut(self) -> int:
        """Completions of which max_length cuts a part."""
        return self._demonstrator.num_cut

    @property
    def num_split(self) -> int:
        """Rows that are learned turn by turn: none."""
        return 0

    @property
    def unused_columns(self) -> list[str]:
        return [f"{name} ({quantity(count, 'row')})" for name, count in self._unused.most_common()]

    @property
    def left_out(self) -> list[str]:
        return self._demonstrator.left_out

    def read(self, table: RowTable) -> Iterator[tuple[str, list[Preference], str | None]]:
        """Yield (line 7, its preferences, what is wrong with it) of each row of a table."""
        for index in range(table.num_rows):
            try:
                if index in table.faults:
                    raise BadRow(table.faults[index])
                yield table.place(index), self.preferences(table.get(index)), None
            except BadRow as fault:
                yield table.place(index), [], str(fault)

    def preferences(self, row: Row) -> list[Preference]:
        """Return those of a row: one, or one for each completion of a pair; raise BadRow."""
        if all(row.get(column) is not None for column in _PAIR):
            columns, labels = ("prompt", *_PAIR), (True, False)
            prompt, *completions = pair_of(row)
        elif self._is_paired or any(row.get(column) is None for column in _SINGLE):
            missing = [c for c in (_PAIR if self._is_paired else _SINGLE) if row.get(c) is None]
            raise BadRow(f"has no {missing[0]}")
        else:
            columns, labels = _SINGLE, (_label(row["label"]),)
            prompt, completions = row["prompt"], [row["completion"]]
        made = [self._made(row, prompt, completion) for completion in completions]
        if any(each.prompt_T != made[0].prompt_T for each in made):
            raise BadRow("chosen and rejected do not begin with the same prompt tokens")
        if len(made) > 1 and made[0].key == made[1].key:
            raise BadRow("chosen and rejected are the same")
        used = {*columns, *(CHAT_COLUMNS if as_messages(prompt) is not None else ())}
        self._unused.update(name for name, value in row.items() if name not in used and value not in EMPTY)
        if self._is_paired or len(made) == 1:
            return [Preference(tuple(made), labels)]
        return [Preference((each,), (label,)) for each, label in zip(made, labels, strict=True)]

    def _made(self, row: Row, prompt: Any, completion: Any) -> Demonstration:
        """Return the demonstration of this completion of the prompt."""
        if as_messages(prompt) is not None and as_messages(completion) is None:
            completion = [{"role": "assistant", "content": completion}]
        chat = {column: row[column] for column in CHAT_COLUMNS if row.get(column) is not None}
        made = self._demonstrator.demonstrations({**chat, "prompt": prompt, "completion": completion})
        if len(made) > 1:
            raise BadRow("the chat template rewrites earlier turns of its completion")
        return made[0]


def pair_of(row: Row) -> tuple[Any, Any, Any]:
    """Return the prompt and its two completions. Without a prompt, and where the prompt is a text but the
    completions are messages, which then begin with it, it is their common beginning; raise BadRow."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    a, b = as_messages(chosen), as_messages(rejected)
    if prompt is not None and (as_messages(prompt) is not None or a is None or b is None):
        return prompt, chosen, rejected
    if a is not None and b is not None:
        count = min(_num_common(a, b), len(a) - 1, len(b) - 1)
        parts = a[:count], a[count:], b[count:]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        count = _num_common(chosen, rejected)
        count -= chosen[:count].endswith(" ")  # a space belongs to the completion's first word
        parts = chosen[:count], chosen[count:], rejected[count:]
    else:
        raise BadRow("chosen and rejected are neither two texts nor two lists of messages")
    if not parts[0]:
        raise BadRow("has no prompt, and chosen and rejected have no common beginning")
    return parts


def _num_common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _label(value: Any) -> bool:
    if isinstance(value, str):
        value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise BadRow(f"label is {value!a}; it must be true or false")
    return bool(value)


def has_pairs(columns: Sequence[str]) -> bool:
    """True if a table has both completions of a pair."""
    return set(_PAIR) <= set(columns)


def has_preferences(columns: Sequence[str]) -> bool:
    """True if a table has pairs, or completions with a label."""
    return has_pairs(columns) or set(_SINGLE) <= set(columns)


def check_preference_columns(name: str, columns: Sequence[str], *, is_paired: bool) -> None:
    """Raise UserError if no row of a table with these columns is a preference."""
    if has_pairs(columns) if is_paired else has_preferences(columns):
        return
    what = "chosen and rejected, with or without prompt"
    what += "" if is_paired else ", or prompt, completion and label"
    hint = "; for rows of prompt, completion and label set --loss kto" if set(_SINGLE) <= set(columns) else ""
    raise UserError(f"{name}: preferences need columns {what}; its columns are {', '.join(columns)}{hint}")


def mismatched(batch: Mapping[int, Preference], offset: int) -> list[Group]:
    """Return each prompt of a batch with the completion of the row before it in the batch, or of the nearest
    one before that with another prompt; the first follows the last. A prompt's index is its row's and offset.

    KTO's estimate of the KL is the mean log-ratio of these (arXiv 2402.01306, 4.2)."""
    indices, groups = list(batch), []
    for place, index in enumerate(indices):
        before = [*indices[:place][::-1], *indices[place + 1 :][::-1]]
        others = (batch[i] for i in before if batch[i].prompt_T != batch[index].prompt_T)
        if (other := next(others, None)) is not None:
            groups.append(batch[index].with_completion_of(other, offset + index))
    return groups
