"""Read stored rows to learn from, demonstrations or preferences, and others whose loss is measured.

Bad rows are left out and counted. A training row whose tokens are those of an evaluation row is left out too.
The order of each epoch is a function of (seed, epoch), so a step's batch depends on its number alone.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, TypeVar

from qerl.algo.seeds import mix
from qerl.config.dpo import DpoConfig
from qerl.config.sft import SftConfig
from qerl.config.task import TaskConfig
from qerl.errors import UserError, quantity
from qerl.tasks.rows.demonstrations import Demonstration, Demonstrator, check_columns
from qerl.tasks.rows.preferences import PreferenceReader, check_preference_columns
from qerl.tasks.rows.table import RowTable, open_rows
from qerl.types import Group, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # takes seconds to import

_SFT_EPOCH = 3  # keeps these seeds apart from those of other draws
Order = Literal["random", "once", "sequential"]
"""Order of the rows: drawn for each epoch, drawn once for all epochs, or as they are stored."""


class StoredItem(Protocol):
    """Interface of a Demonstration and a Preference: a row as tokens."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    def group(self, index: int) -> Group: ...
    def prompt(self, index: int) -> Prompt: ...


Item = TypeVar("Item", bound=StoredItem)


class Reader(Protocol[Item]):
    """Reader of rows, which counts the ones that it changes or leaves out."""

    @property
    def num_cut(self) -> int: ...
    @property
    def num_split(self) -> int: ...
    @property
    def unused_columns(self) -> list[str]: ...
    @property
    def left_out(self) -> list[str]: ...
    def read(self, table: RowTable) -> Iterator[tuple[str, list[Item], str | None]]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Form(Generic[Item]):
    """Reader and check of one kind of rows."""

    check: Callable[[RowTable, SftConfig], None]
    """Raises UserError for a table that lacks the columns."""
    reader: Callable[["PreTrainedTokenizerBase", SftConfig, frozenset[int]], Reader[Item]]
    order: Order = "random"


DEMONSTRATIONS: Form[Demonstration] = Form(
    lambda table, config: check_columns(table.name, table.columns, config.text_column), Demonstrator
)


def form_of_rows(config: DpoConfig) -> Form[Any]:
    """Return how the rows are read: as demonstrations, or as preferences if there is a loss of them. KTO
    compares the rows of a batch, which so stay the same in all epochs."""
    if not config.loss_type:
        return DEMONSTRATIONS
    is_paired = config.is_paired
    return Form(
        lambda table, _: check_preference_columns(table.name, table.columns, is_paired=is_paired),
        functools.partial(PreferenceReader, is_paired=is_paired),
        "once" if config.has_kl and config.order == "random" else config.order,
    )


@dataclasses.dataclass
class SftRows(Generic[Item]):
    """The items of rows, in the order of the rows."""

    learned: list[Item]
    evaluated: list[Item]
    notices: list[str]
    """A line for each table of which rows are changed or left out."""
    unused: list[str]
    """A line for each table with columns that are not used."""
    sources: dict[str, str]
    """Fingerprints of hub data sets."""
    seed: int
    num_held_out: int = 0
    """Items of the rows that eval_data or eval_fraction hold out, of which `evaluated` are at most
    max_evaluated."""
    block_tokens: int | None = None
    """A batch counts blocks of whole rows, each of at most this many tokens; None: it counts rows."""
    order: Order = "random"

    def __post_init__(self):
        lengths, size = [each.num_tokens for each in self.learned], self.block_tokens
        self._blocks = [[i] for i in range(len(lengths))] if size is None else best_fit(lengths, size)
        self._order = functools.lru_cache(maxsize=1)(self._shuffled)

    @classmethod
    def read(
        cls,
        config: SftConfig,
        tokenizer: "PreTrainedTokenizerBase",
        stop_ids: frozenset[int],
        form: Form[Item],
        *,
        max_evaluated: int,
        seed: int,
    ) -> Self:
        tables = [table for table in open_rows(tables_of(config)) if table is not None]
        for table in tables:
            form.check(table, config)
        makers = [form.reader(tokenizer, config, stop_ids) for _ in tables]
        read = [_items(table, maker, config) for table, maker in zip(tables, makers, strict=True)]
        made, notices = [each for each, _ in read], [notice for _, notice in read if notice is not None]
        unused = [
            _unused_line(table.name, maker.unused_columns)
            for table, maker in zip(tables, makers, strict=True)
            if maker.unused_columns
        ]
        rows = made[0]
        held_out = rows[len(rows) - int(len(rows) * config.eval_fraction) :] if len(tables) == 1 else made[1]
        num_held_out = sum(map(len, held_out))
        if len(tables) == 1:
            held_out = _first_rows(held_out[::-1], max_evaluated)[::-1]
            rows = rows[: len(rows) - len(held_out)]
        learned, evaluated = _flat(rows), _flat(_first_rows(held_out, max_evaluated))
        name, known = tables[0].name, {each.key for each in evaluated}
        fresh = [each for each in learned if each.key not in known]
        if len(fresh) < len(learned):
            notices.append(f"{name}: {len(learned) - len(fresh):,} rows are evaluation rows and left out")
        if not fresh:
            raise UserError(f"no row is left to learn from: {'; '.join(notices) or f'{name} has none'}")
        sources = {f"data set {t.name}": t.fingerprint for t in tables if t.fingerprint is not None}
        block_tokens = config.max_length if config.packing else None
        counts = {"num_held_out": num_held_out, "block_tokens": block_tokens}
        return cls(fresh, evaluated, notices, unused, sources, seed=seed, order=form.order, **counts)

    @classmethod
    def read_evaluated(
        cls,
        config: SftConfig,
        tokenizer: "PreTrainedTokenizerBase",
        stop_ids: frozenset[int],
        form: Form[Item],
    ) -> Self:
        """Read all rows of config.data as evaluation rows."""
        table, _ = open_rows(tables_of(config))
        form.check(table, config)
        rows, notice = _items(table, form.reader(tokenizer, config, stop_ids), config)
        items = _flat(rows)
        if not items:
            raise UserError(f"{table.name}: no row is left to evaluate")
        return cls([], items, [] if notice is None else [notice], unused=[], sources={}, seed=0)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(each.num_tokens for each in [*self.learned, *self.evaluated])

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of batches in which each item comes once; the last may be smaller.
        batch_size: rows, or blocks."""
        return math.ceil(len(self._blocks) / batch_size)

    def batch(self, step: int, batch_size: int) -> list[Group]:
        return [item.group(index) for index, item in self.items(step, batch_size).items()]

    def items(self, step: int, batch_size: int) -> dict[int, Item]:
        """Return the items of a step's batch by their index."""
        epoch, place = divmod(step, self.steps_per_epoch(batch_size))
        chosen = self._order(epoch)[place * batch_size : (place + 1) * batch_size]
        return {index: self.learned[index] for block in chosen for index in self._blocks[block]}

    def evaluation(self) -> list[Group]:
        """Return the evaluation rows; their indices follow those of the training rows."""
        return [each.group(len(self.learned) + i) for i, each in enumerate(self.evaluated)]

    def _shuffled(self, epoch: int) -> list[int]:
        if self.order == "sequential":
            return list(range(len(self._blocks)))
        epoch = 0 if self.order == "once" else epoch
        import torch  # rows are checked before it is imported

        generator = torch.Generator().manual_seed(mix(self.seed, _SFT_EPOCH, epoch))
        return torch.randperm(len(self._blocks), generator=generator).tolist()


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the lengths in blocks: the longest first, each into the fullest block that has
    room for it (best-fit decreasing). No length may exceed the capacity."""
    blocks: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # sorted: room that is left, number of the block
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(spaces, (lengths[index], -1))
        if place == len(spaces):
            space, block = capacity, len(blocks)
            blocks.append([])
        else:
            space, block = spaces.pop(place)
        blocks[block].append(index)
        bisect.insort(spaces, (space - lengths[index], block))
    return blocks


def tables_of(config: SftConfig) -> TaskConfig:
    """Return where the rows are, in the form that `open_rows` takes."""
    return TaskConfig(name=config.data, split=config.split, held_out_split=config.eval_data)


def _flat(rows: Sequence[list[Item]]) -> list[Item]:
    return [item for items in rows for item in items]


def _first_rows(rows: Sequence[list[Item]], max_items: int) -> Sequence[list[Item]]:
    """Return the first rows that have at most this many items together: one that is several, such as a pair
    of KTO's, is not parted."""
    totals = itertools.accumulate(map(len, rows))
    return rows[: sum(total <= max_items for total in totals)]


def _items(table: RowTable, reader: Reader[Item], config: SftConfig) -> tuple[list[list[Item]], str | None]:
    """Return the items of each row that has any, and a line if a row is not learned as it stands."""
    made: list[list[Item]] = []
    reasons: list[str] = []
    for place, items, fault in reader.read(table):
        made += [items] if items else []
        reasons += [] if fault is None else [f"{place} {fault}"]
    counts = {
        f"cut to {config.max_length:,} tokens": reader.num_cut,
        "learned turn by turn, because the chat template rewrites earlier turns": reader.num_split,
        f"left out (first: {next(iter(reasons), '')})": len(reasons),
    }
    parts = [f"{count:,} {what}" for what, count in counts.items() if count]
    if reader.left_out:
        parts.append(f"the chat template does not render {', '.join(reader.left_out)}")
    text = "; ".join(parts)
    return made, f"{table.name}: of {quantity(table.num_rows, 'row')} {text}" if text else None


def _unused_line(name: str, columns: list[str]) -> str:
    """Return "chats.jsonl: not used: columns source (12 rows), id (12 rows)"."""
    more = f" and {len(columns) - 12} more" if len(columns) > 12 else ""
    return f"{name}: not used: column{'s' if len(columns) > 1 else ''} {', '.join(columns[:12])}{more}"
