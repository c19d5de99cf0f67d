"""Treatment of samples truncated at max_tokens: keep, leave out of the loss, or penalize by length.

    penalty = -clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1)

The penalty is added to the reward before advantages are computed. Penalty and mask are DAPO's: arXiv
2503.14476, 3.4. A masked sample is left out of the loss and its token counts, but its reward still counts in
its group's mean.
"""

import dataclasses
from collections.abc import Callable

from qerl.types import Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Overlong:
    """OVERLONG["mask"] is Overlong(penalty=no_penalty, is_kept=is_complete)."""

    penalty: Callable[[int, int, int], float]
    """(length, max_tokens, buffer_tokens) -> number in [-1, 0] that is added to the reward."""
    is_kept: Callable[[Sample], bool]
    """True if the sample takes part in the loss."""


def no_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    return 0.0


def soft_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Fall from 0 to -1 over the last buffer_tokens tokens before max_tokens."""
    excess = (length - (max_tokens - buffer_tokens)) / buffer_tokens
    return -min(max(excess, 0.0), 1.0)


def always(sample: Sample) -> bool:
    return True


def is_complete(sample: Sample) -> bool:
    """True if the sample ended with a stop token or stop string."""
    return sample.finish == "stop"


OVERLONG: dict[str, Overlong] = {
    "keep": Overlong(penalty=no_penalty, is_kept=always),
    "mask": Overlong(penalty=no_penalty, is_kept=is_complete),
    "shape": Overlong(penalty=soft_penalty, is_kept=always),
}
