"""The prompts of each step, a function of (seed, step, round) alone.

Round 0 walks through the training rows in an order drawn anew for each epoch, num_prompts rows a step; the
rows left over at the end of an epoch wait for another, so that no step has a row twice. Round r > 0 of a step
(dynamic sampling asks for it) draws from a stream of its own among the rows that this step has not had: how
many rounds a step took changes nothing for later steps.

Held out are the last task.num_held_out rows that fit, or the first ones of task.held_out_split. A training
row that makes the same prompt as one of those is not learned from (procedural tasks repeat themselves: two
one-digit numbers make 121 sums), so that held-out accuracy never measures memory.
"""

import itertools
from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from qerl.algo.seeds import mix
from qerl.config import TaskConfig
from qerl.errors import UserError
from qerl.tasks.prompt import Renderer
from qerl.tasks.rows import open_rows
from qerl.types import Prompt

_EPOCH, _ROUND = 1, 2  # keep the two streams apart


class Task:
    """Rows are rendered when asked for; what is kept of a training row is whether it can be learned from."""

    def __init__(
        self,
        renderer: Renderer,
        *,
        name: str,
        num_rows: int,
        held_out: list[Prompt],
        num_dropped: int,
        seed: int,
        max_prompt_tokens: int,
    ):
        self.name = name
        self.num_dropped = num_dropped
        """Rows met so far, held-out ones included, whose prompt is longer than allowed."""
        self.num_repeated = 0
        """Training rows met so far that make the same prompt as a held-out row."""
        self._renderer, self._num_rows, self._held_out = renderer, num_rows, held_out
        self._held_out_texts = {prompt.text for prompt in held_out}
        self._seed, self._max_tokens = seed, max_prompt_tokens
        self._is_usable: dict[int, bool] = {}
        self._walks: dict[int, tuple[list[list[int]], Iterator[list[int]]]] = {}

    def held_out(self, num: int | None) -> list[Prompt]:
        """The same ones each time, in the data set's order; fewer where fewer are kept, None takes all."""
        return self._held_out[:num]

    def train_prompts(self, step: int, num_prompts: int, round: int = 0) -> list[Prompt]:
        """Fewer, even none, in a round > 0 that finds no rows that the step has not had."""
        rows = self._batch(step, num_prompts)
        had = set(rows)
        for later in range(1, round + 1):
            order = self._order(mix(self._seed, _ROUND, step, later))
            fresh = (row for row in order if row not in had and self._check(row))
            rows = list(itertools.islice(fresh, num_prompts))
            had.update(rows)
        return [self._renderer.prompt(row, index=row) for row in rows]

    def _batch(self, step: int, num_prompts: int) -> list[int]:
        batches, walk = self._walks.setdefault(num_prompts, ([], self._walk(num_prompts)))
        while len(batches) <= step:
            batches.append(next(walk))
        return batches[step]

    def _walk(self, num_prompts: int) -> Iterator[list[int]]:
        """Round 0 of each step in turn. What rows must be skipped is known only by walking."""
        for epoch in itertools.count():
            order = self._order(mix(self._seed, _EPOCH, epoch))
            usable = filter(self._check, order)
            batch = list(itertools.islice(usable, num_prompts))
            if len(batch) < num_prompts:
                raise UserError(
                    f"num_prompts is {num_prompts}, but {self.name} has only {len(batch)} rows to learn from"
                    f" ({len(self._held_out)} held out, {self.num_repeated} the same as those,"
                    f" {self.num_dropped} longer than {self._max_tokens} tokens)"
                )
            while len(batch) == num_prompts:
                yield batch
                batch = list(itertools.islice(usable, num_prompts))

    def _order(self, seed: int) -> list[int]:
        return torch.randperm(self._num_rows, generator=torch.Generator().manual_seed(seed)).tolist()

    def _check(self, row: int) -> bool:
        """Whether a training row can be learned from; counts those that cannot, once."""
        if row not in self._is_usable:
            prompt = self._renderer.prompt(row, index=row)
            is_short = len(prompt.tokens_T) <= self._max_tokens
            is_repeated = prompt.text in self._held_out_texts
            self.num_dropped += not is_short
            self.num_repeated += is_short and is_repeated
            self._is_usable[row] = is_short and not is_repeated
        return self._is_usable[row]


def build_task(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, max_prompt_tokens: int
) -> Task:
    """Prompts longer than max_prompt_tokens are passed over, and the next row is taken."""
    rows, apart = open_rows(config)
    renderer = Renderer(config, rows, tokenizer)
    if apart is None:
        order = reversed(range(rows.num_rows))
        prompts, num_dropped = _fitting(renderer, order, 0, config.num_held_out, max_prompt_tokens)
        held_out = prompts[::-1]
        num_rows = held_out[0].index if held_out else rows.num_rows
    else:
        order, offset = range(apart.num_rows), rows.num_rows
        held_out, num_dropped = _fitting(
            Renderer(config, apart, tokenizer), order, offset, config.num_held_out, max_prompt_tokens
        )
        num_rows = rows.num_rows
    if num_rows == 0 or (apart is None and len(held_out) < config.num_held_out):
        raise UserError(
            f"task.num_held_out is {config.num_held_out}: {rows.name} has {rows.num_rows} rows"
            f" ({num_dropped} longer than {max_prompt_tokens} tokens), which leaves none to learn from"
        )
    return Task(
        renderer,
        name=rows.name,
        num_rows=num_rows,
        held_out=held_out,
        num_dropped=num_dropped,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
    )


def every_prompt(
    config: TaskConfig, tokenizer: PreTrainedTokenizerBase, *, num: int | None, max_prompt_tokens: int
) -> list[Prompt]:
    """The rows of task.split, all or the first num, none of which is learned from.

    A problem that does not fit is an error: a set without it would be another set.
    """
    rows, _ = open_rows(config)
    renderer = Renderer(config, rows, tokenizer)
    indices = range(rows.num_rows if num is None else min(num, rows.num_rows))
    prompts = [renderer.prompt(index, index=index) for index in indices]
    for prompt in prompts:
        if (length := len(prompt.tokens_T)) > max_prompt_tokens:
            raise UserError(
                f"{rows.name}: row {prompt.index + 1} makes a prompt of {length} tokens, and the model leaves"
                f" {max_prompt_tokens} beside max_tokens"
            )
    return prompts


def _fitting(
    renderer: Renderer, order: Iterable[int], offset: int, num: int, max_tokens: int
) -> tuple[list[Prompt], int]:
    """The first num prompts in this order that are short enough, and how many were not."""
    prompts, num_dropped = [], 0
    for row in order if num else ():
        prompt = renderer.prompt(row, index=offset + row)
        if len(prompt.tokens_T) <= max_tokens:
            prompts.append(prompt)
        else:
            num_dropped += 1
        if len(prompts) == num:
            break
    return prompts, num_dropped
