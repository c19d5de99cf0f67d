"""Stored rows to learn from, to imitate or preferences, and which of their tokens are learned."""

import dataclasses

from qerl.config.check import check_not_negative, check_positive
from qerl.config.task import ROW_FILES
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """`qerl sft` and `qerl dpo` set it; a run with an empty `data` learns from rewards."""

    data: str = ""
    """Rows: a .jsonl, .json, .parquet or .csv file, or a hub id. A row of `qerl sft` is a chat (messages), a
    prompt with its completion, or a text; of `qerl dpo` a prompt with chosen and rejected. docs/sft.md."""

    split: str = "train"
    """Split of a hub data set."""

    eval_data: str | None = None
    """Rows whose loss is measured but not learned; None: a share of `data`."""

    eval_fraction: float = 0.05
    """Share of the rows, from the last, that is kept for evaluation if there is no eval_data; whole rows."""

    num_train_epochs: float = 1.0
    """Number of passes over the rows."""

    max_length: int | None = 2048
    """Maximum tokens of a row; longer rows are cut. None: as many as the model has positions."""

    packing: bool = False
    """Count blocks instead of rows in a batch. A block has whole rows of at most max_length tokens together.
    Nothing is padded in either case."""

    assistant_only_loss: bool = True
    """Learn only what the assistant says, or the completion; else every token after the first. A text without
    roles is learned whole."""

    allow_special_tokens: bool = False
    """Read control tokens in the text of messages as control tokens, not as text. Rows without messages are
    read as written."""

    text_column: str = "text"
    """Column of rows that are plain texts."""

    num_eval_samples: int = 4
    """Number of evaluation rows that the model answers greedily at each evaluation but the first, for the
    report."""

    def __post_init__(self):
        check_positive(self, "num_train_epochs", "max_length", prefix="sft.")
        check_not_negative(self, "num_eval_samples", prefix="sft.")
        share = self.eval_fraction
        require(0 <= share < 1, f"sft.eval_fraction must be in [0, 1), got {share}")

    @property
    def is_file(self) -> bool:
        """True if `data` is a file, which has no splits."""
        return self.data.endswith(ROW_FILES)
