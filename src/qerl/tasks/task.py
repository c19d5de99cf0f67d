"""Select the prompts of each step as a function of (seed, step, round).

Round 0 iterates over the training rows in a new random order each epoch, num_prompts rows per step; the rows
left over at the end of an epoch are skipped, so that no step has a row twice. Round r > 0 of a step (for
dynamic sampling) uses its own random stream over the rows that the step has not used: the number of rounds of
a step does not affect later steps.

The held-out rows are the last task.num_held_out rows that fit, or the first ones of task.held_out_split. A
training row with the same prompt as a held-out row is skipped (procedural tasks repeat: two one-digit numbers
make 121 sums), so that held-out accuracy does not measure memorization. Where all prompts are the same, as
the first message of an environment may be, the other columns must be the same too.

A row that no prompt can be made of is left out and counted: those of a file before the first step, those
generated on demand or of the hub when they are drawn.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from qerl.algo.seeds import mix
from qerl.config import TaskConfig
from qerl.errors import UserError, quantity
from qerl.tasks.rows.checks import check_rows, examples, row_notice
from qerl.tasks.rows.known_sets import open_prompt_rows
from qerl.tasks.rows.prompt import Renderer
from qerl.types import Prompt

_EPOCH, _ROUND = 1, 2  # separate random streams
_NUM_COMPARED = 8  # training rows whose prompts show whether all are the same


class Task:
    """Rows are rendered on demand; only whether a training row is usable is remembered."""

    def __init__(
        self,
        config: TaskConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_prompt_tokens: int,
        strict: bool = False,
    ):
        """Open the data set. Rows whose prompt exceeds max_prompt_tokens are skipped, and so are bad rows
        unless strict makes them an error."""
        tables, self.known_columns = open_prompt_rows(config)
        """known_columns: a line for each table that has columns by those of a known data set."""
        self.name = tables[0].name
        self.renderers = [Renderer(config, each, tokenizer) for each in tables]
        """Renderers of the training rows and, if they have a table of their own, of the held-out rows."""
        self.sources = {f"data set {t.name}": t.fingerprint for t in tables if t.fingerprint is not None}
        """Fingerprints of hub data sets by name."""
        for each in self.renderers:
            check_rows(each, strict=strict)
        draws = [each.prompt if strict else each.usable_prompt for each in self.renderers]
        num_rows, num_held_out = tables[0].num_rows, config.num_held_out
        if len(tables) == 1:
            num_held_out = config.num_held_out_of(num_rows)
            order = reversed(range(num_rows))
            self._held_out, self.num_dropped = _fitting(draws[0], order, 0, num_held_out, max_prompt_tokens)
            self._held_out.reverse()
            num_rows = self._held_out[0].index if self._held_out else num_rows
        else:
            order = range(tables[1].num_rows)
            limits = num_held_out, max_prompt_tokens
            self._held_out, self.num_dropped = _fitting(draws[1], order, num_rows, *limits)
        """num_dropped: rows seen so far, held-out rows included, whose prompt is too long."""
        self.num_repeated = 0
        """Training rows seen so far with the same prompt as a held-out row."""
        if num_rows == 0 or (len(tables) == 1 and len(self._held_out) < (num_held_out or 0)):
            raise UserError(
                f"task.num_held_out is {num_held_out}: {self.name} has"
                f" {quantity(tables[0].num_rows, 'row')} ({self.num_dropped} longer than"
                f" {max_prompt_tokens} tokens, {len(self.renderers[0].faults)} unusable),"
                " which leaves none to train on: lower task.num_held_out, or give more rows"
            )
        self._renderer, self._draw, self._num_rows = self.renderers[0], draws[0], num_rows
        texts = {prompt.text for prompt in self._held_out}
        first = (draws[0](row, index=row) for row in range(min(num_rows, _NUM_COMPARED)))
        self._compares_columns = len(texts) == 1 and all(p is None or p.text in texts for p in first)
        self._held_out_keys = {self._key(prompt) for prompt in self._held_out}
        self._seed, self._max_tokens = seed, max_prompt_tokens
        self._is_usable: dict[int, bool] = {}
        self._iterators: dict[int, tuple[list[list[int]], Iterator[list[int]]]] = {}

    def notices(self, config: TaskConfig, *, reads_answer: bool) -> list[str]:
        """Return a line for each table of which rows are skipped or misread; see rows/checks.py."""
        settings = {"reads_answer": reads_answer, "max_prompt_tokens": self._max_tokens}
        lines = [row_notice(each, config, **settings) for each in self.renderers]
        self.take_faults()  # their number is in the lines
        return [line for line in lines if line is not None]

    @property
    def num_bad(self) -> int:
        """Number of rows found to be bad so far, held-out rows included."""
        return sum(len(each.faults) for each in self.renderers)

    def take_faults(self) -> list[str]:
        """Return a line for each row that was found to be bad since the last call."""
        return [
            f"{each.rows.name}: left out {line}" for each in self.renderers for line in each.take_faults()
        ]

    def held_out(self, num: int | None) -> list[Prompt]:
        """Return the first num held-out prompts, or all for None, in the data set's order."""
        return self._held_out[:num]

    def train_prompts(self, step: int, num_prompts: int, round: int = 0) -> list[Prompt]:
        """Return the prompts of a round; a round > 0 may have fewer or none if the unused rows run out."""
        rows = self._batch(step, num_prompts)
        used = set(rows)
        for later in range(1, round + 1):
            order = self._order(mix(self._seed, _ROUND, step, later))
            fresh = (row for row in order if row not in used and self._check(row))
            rows = list(itertools.islice(fresh, num_prompts))
            used.update(rows)
        return [self._renderer.prompt(row, index=row) for row in rows]

    def _batch(self, step: int, num_prompts: int) -> list[int]:
        batches, iterator = self._iterators.setdefault(num_prompts, ([], self._iterate(num_prompts)))
        while len(batches) <= step:
            batches.append(next(iterator))
        return batches[step]

    def _iterate(self, num_prompts: int) -> Iterator[list[int]]:
        """Yield round 0 of each step. Which rows are skipped is known only by iterating."""
        for epoch in itertools.count():
            order = self._order(mix(self._seed, _EPOCH, epoch))
            usable = filter(self._check, order)
            batch = list(itertools.islice(usable, num_prompts))
            if len(batch) < num_prompts:
                bad = f"{self.num_bad} unusable" + (f": {examples(self._renderer)}" if self.num_bad else "")
                raise UserError(
                    f"num_prompts is {num_prompts}, but {self.name} has only {len(batch)} training rows"
                    f" ({len(self._held_out)} held out, {self.num_repeated} repeat a held-out prompt,"
                    f" {self.num_dropped} longer than {self._max_tokens} tokens, {bad}):"
                    " lower num_prompts or task.num_held_out"
                )
            while len(batch) == num_prompts:
                yield batch
                batch = list(itertools.islice(usable, num_prompts))

    def _key(self, prompt: Prompt) -> str:
        """Return what a training row must not share with a held-out one."""
        columns = json.dumps(prompt.columns, sort_keys=True) if self._compares_columns else ""
        return prompt.text + columns

    def _order(self, seed: int) -> list[int]:
        return torch.randperm(self._num_rows, generator=torch.Generator().manual_seed(seed)).tolist()

    def _check(self, row: int) -> bool:
        """True if a training row is usable; count each other row once."""
        if row not in self._is_usable:
            prompt = self._draw(row, index=row)
            is_short = prompt is not None and len(prompt.tokens_T) <= self._max_tokens
            is_repeated = prompt is not None and self._key(prompt) in self._held_out_keys
            self.num_dropped += prompt is not None and not is_short
            self.num_repeated += is_short and is_repeated
            self._is_usable[row] = is_short and not is_repeated
        return self._is_usable[row]


def all_prompts(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, num: int | None, max_prompt_tokens: int
) -> list[Prompt]:
    """Return the prompts of task.split, all or the first num, for a benchmark.

    A prompt that does not fit is an error: without it the result would be for another set.
    """
    (rows, *_), _ = open_prompt_rows(config)
    renderer = Renderer(config, rows, tokenizer)
    indices = range(rows.num_rows if num is None else min(num, rows.num_rows))
    prompts = [renderer.prompt(index, index=index) for index in indices]
    for prompt in prompts:
        if (length := len(prompt.tokens_T)) > max_prompt_tokens:
            raise UserError(
                f"{rows.name}: the prompt of row {prompt.index + 1} has {length} tokens; the model leaves"
                f" {max_prompt_tokens} besides max_tokens"
            )
    return prompts


def _fitting(
    draw: Callable[..., Prompt | None], order: Iterable[int], offset: int, num: int | None, max_tokens: int
) -> tuple[list[Prompt], int]:
    """Return the first num prompts in this order that are short enough, or all for None, and the number that
    are too long."""
    prompts, num_dropped = [], 0
    for row in order if num != 0 else ():
        prompt = draw(row, index=offset + row)
        if prompt is not None and len(prompt.tokens_T) <= max_tokens:
            prompts.append(prompt)
        else:
            num_dropped += prompt is not None
        if len(prompts) == num:
            break
    return prompts, num_dropped
