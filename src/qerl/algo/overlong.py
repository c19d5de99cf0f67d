"""What becomes of a sample that runs into max_tokens: nothing, no part in the loss, or a penalty by length.

    penalty = -clip((length - (max_tokens - buffer_tokens)) / buffer_tokens, 0, 1)

It is added to the reward before the advantage is taken. Both the penalty and the leaving out are DAPO's:
arXiv 2503.14476, 3.4. A masked sample's reward still counts in its group's mean: it is left out of the loss
(and of the loss's token counts), not of the comparison.
"""

import dataclasses
from collections.abc import Callable

from qerl.types import Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Overlong:
    """OVERLONG["mask"] is Overlong(name="mask", penalty=no_penalty, is_kept=is_complete)."""

    name: str
    penalty: Callable[[int, int, int], float]
    """(length, max_tokens, buffer_tokens) -> what is added to the reward, from -1 to 0."""
    is_kept: Callable[[Sample], bool]
    """Whether the sample takes part in the loss."""


def no_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    return 0.0


def soft_penalty(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """Falls from 0 to -1 over the last buffer_tokens tokens before max_tokens."""
    excess = (length - (max_tokens - buffer_tokens)) / buffer_tokens
    return -min(max(excess, 0.0), 1.0)


def always(sample: Sample) -> bool:
    return True


def is_complete(sample: Sample) -> bool:
    """Whether the sample ended by itself."""
    return sample.finish == "stop"


OVERLONG: dict[str, Overlong] = {
    "keep": Overlong(name="keep", penalty=no_penalty, is_kept=always),
    "mask": Overlong(name="mask", penalty=no_penalty, is_kept=is_complete),
    "shape": Overlong(name="shape", penalty=soft_penalty, is_kept=always),
}
