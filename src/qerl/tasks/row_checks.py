"""Count the rows of which a run would otherwise skip or misread something silently.

    too long          the prompt does not fit beside sample.max_tokens: the row is skipped
    no answer         the answer is null or blank, and a reward reads it
    assistant last    the chat ends with an assistant's turn: the answer may be in the prompt

All rows of a table are looked at; of those generated on demand, the first ones. A prompt has at most as many
tokens as bytes, so most rows need not be rendered.
"""

from collections.abc import Sequence

from qerl.config import TaskConfig
from qerl.tasks.prompt import Renderer

_NUM_GENERATED = 128


def row_notice(
    renderer: Renderer, config: TaskConfig, *, reads_answer: bool, max_prompt_tokens: int
) -> str | None:
    """Return one line about a table of rows; None if every row is used as it stands."""
    rows = renderer.rows
    answers = rows.values(config.answer_column) if config.answer_column in rows.columns else []
    no_answer = reads_answer * sum(answer is None or not str(answer).strip() for answer in answers)
    chats = rows.values(str(rows.prompt_column)) if renderer.has_messages else []
    last = sum(isinstance(c, list) and bool(c) and _role(c[-1]) == "assistant" for c in chats)
    num_long, num_checked = _count_long(renderer, max_prompt_tokens)
    counts = {
        f"longer than {max_prompt_tokens} tokens, which sample.max_tokens leaves, and skipped": num_long,
        f"without {config.answer_column}, so that a sample gets no reward": no_answer,
        "a chat that ends with an assistant's turn, which the model goes on with": last,
    }
    told = "; ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"{rows.name}: of {num_checked:,} rows {told}" if told else None


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _count_long(renderer: Renderer, max_tokens: int) -> tuple[int, int]:
    """Return how many rows are too long, and of how many."""
    rows = renderer.rows
    columns = [rows.values(column) for column in renderer.columns]
    if not columns or not columns[0]:
        indices: Sequence[int] = range(min(_NUM_GENERATED, rows.num_rows))
        num_checked = len(indices)
    else:
        sizes = [
            sum(len(str(value).encode(errors="replace")) for value in row)
            for row in zip(*columns, strict=True)
        ]
        added = max(0, len(renderer.prompt(0, index=0).text.encode(errors="replace")) - sizes[0])
        indices = [i for i, size in enumerate(sizes) if size + added >= max_tokens]
        num_checked = rows.num_rows
    num_tokens = (len(renderer.prompt(index, index=index).tokens_T) for index in indices)
    return sum(count > max_tokens for count in num_tokens), num_checked
