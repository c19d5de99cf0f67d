"""Consecutive tokens of one sequence whose earlier positions are cached."""

import dataclasses
from collections.abc import Callable

from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    tokens_T: list[int]
    first_position: int
    pages: list[int]
    noise_row: int = 0
    """Row in the noise table of the norms."""
    on_hidden: Callable[[Tensor], None] | None = None
    """Called with the hidden states of its next tokens, [rows, D], after each forward."""
    state: list[int] = dataclasses.field(default_factory=list)
    """Slot of the recurrent states before its next token, and after it; empty if no layer has any."""
    is_cached: bool = False
    """True if the keys and values are in the pages already, and only the states are not."""
    window_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those of layers with a window, by their place: for the positions that later queries see."""
    prompt_window_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    """Likewise of the prompt, for reading only."""

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + len(self.tokens_T))
