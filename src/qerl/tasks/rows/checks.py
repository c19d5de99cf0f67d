"""Count the rows of which a run would otherwise skip or misread something silently.

    too long          the prompt does not fit beside sample.max_tokens: the row is skipped
    no answer         the answer is null or blank, and a reward reads it
    assistant last    the chat ends with an assistant's turn: the answer may be in the prompt
    unusable          no prompt can be made of the row (prompt.py): the row is left out
    no test           the reward `code` cannot run the row's tests, or they could not fail

All rows of a table are looked at; of those generated on demand, the first ones. A prompt has at most as many
tokens as bytes, so most rows need not be rendered.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from qerl.config import TaskConfig
from qerl.errors import UserError, printable, quantity
from qerl.tasks.code.test_cases import parse_tests
from qerl.tasks.rows.prompt import Renderer
from qerl.tasks.rows.table import RowTable

_NUM_GENERATED = 128
_NUM_EXAMPLES = 2


def row_notice(
    renderer: Renderer, config: TaskConfig, *, reads_answer: bool, max_prompt_tokens: int
) -> str | None:
    """Return one line about a table of rows; None if every row is used as it stands."""
    rows = renderer.rows
    num_long, num_checked = _count_long(renderer, max_prompt_tokens)
    answers = rows.values(config.answer_column) if config.answer_column in rows.columns else []
    no_answer = sum(answer is None or not str(answer).strip() for answer in _good(renderer, answers))
    chats = rows.values(str(rows.prompt_column)) if renderer.has_messages else []
    ends = (chat[-1] for chat in _good(renderer, chats) if isinstance(chat, list) and chat)
    last = sum(isinstance(end, dict) and end.get("role") == "assistant" for end in ends)
    counts = {
        f"unusable and left out ({examples(renderer)})": len(renderer.faults),
        f"longer than {max_prompt_tokens} tokens, which sample.max_tokens leaves, and skipped": num_long,
        f"without {config.answer_column}, so that a sample gets no reward": reads_answer * no_answer,
        "a chat that ends with an assistant's turn, which the model continues": last,
    }
    if reads_answer and "code" in config.rewards:
        num_without, example = _count_untestable(rows, config.answer_column)
        what = f"whose {config.answer_column} cannot be run, so that a sample gets no reward{example}"
        counts[what] = num_without
    text = "; ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"{rows.name}: of {quantity(num_checked, 'row')} {text}" if text else None


def examples(renderer: Renderer) -> str:
    """Return the first bad rows: "line 3: has no prompt; line 8: has no prompt; ..."."""
    bad = sorted(renderer.faults.items())
    shown = [f"{renderer.rows.place(index)}: {fault[:200]}" for index, fault in bad[:_NUM_EXAMPLES]]
    return "; ".join([*shown, *["..."] * (len(bad) > _NUM_EXAMPLES)])


def check_rows(renderer: Renderer, *, strict: bool) -> None:
    """Find the bad rows; raise UserError if no row can be used, or with strict if any cannot."""
    rows = renderer.rows
    if rows.scan is None:
        num_checked = min(_NUM_GENERATED, rows.num_rows)
        for index in range(num_checked):
            renderer.usable_prompt(index, index=index)
    else:
        num_checked = rows.num_rows
        for index, row in enumerate(rows.scan(renderer.columns)):
            renderer.check(index, row)
    num_bad = len(renderer.faults)
    if num_bad == num_checked or (strict and num_bad):
        raise UserError(
            f"{rows.name}: {num_bad:,} of {quantity(num_checked, 'row')} cannot be used: {examples(renderer)}"
        )


def _good(renderer: Renderer, values: list[Any]) -> Iterator[Any]:
    """Yield a column's values without those of the rows found to be bad."""
    return (value for index, value in enumerate(values) if index not in renderer.faults)


def _count_untestable(rows: RowTable, column: str) -> tuple[int, str]:
    """Return how many rows have tests that the reward `code` refuses, and " (line 3: why)" of the first."""
    tests = rows.values(column) if column in rows.columns else []
    points = rows.values("entry_point") if "entry_point" in rows.columns else [None] * len(tests)
    count, example = 0, ""
    for index, row in enumerate(zip(tests, points, strict=True)):
        if row[0] is None or not str(row[0]).strip():
            continue  # counted as a row without an answer
        try:
            parse_tests(*row)
        except ValueError as error:
            count, example = count + 1, example or f" ({rows.place(index)}: {printable(str(error))[:200]})"
    return count, example


def _count_long(renderer: Renderer, max_tokens: int) -> tuple[int, int]:
    """Return how many rows are too long, and of how many."""
    rows = renderer.rows
    columns = [rows.values(column) for column in renderer.columns]
    if not columns or not columns[0]:
        indices: Sequence[int] = range(min(_NUM_GENERATED, rows.num_rows))
        num_checked = len(indices)
    else:
        sizes = [
            0 if i in renderer.faults else sum(len(str(value).encode(errors="replace")) for value in row)
            for i, row in enumerate(zip(*columns, strict=True))
        ]
        drawn = ((index, renderer.usable_prompt(index, index=index)) for index in range(rows.num_rows))
        first = next(((i, prompt.text) for i, prompt in drawn if prompt is not None), None)
        added = 0 if first is None else max(0, len(first[1].encode()) - sizes[first[0]])
        indices = [i for i, size in enumerate(sizes) if size + added >= max_tokens]
        num_checked = rows.num_rows
    prompts = (renderer.usable_prompt(index, index=index) for index in indices)
    num_long = sum(len(prompt.tokens_T) > max_tokens for prompt in prompts if prompt is not None)
    return num_long, num_checked
