"""How long a conversation with an environment may be."""

import dataclasses

from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig:
    """Read where an environment is among task.rewards. sample.max_tokens bounds all turns together, and what
    is said between them."""

    max_turns: int = 8
    """Most turns of a sample; then it is over, with the rewards so far."""

    turn_tokens: int | None = None
    """Most tokens of one turn; None: as many as the sample may have. A turn that is cut is answered too."""

    max_concurrent: int = 256
    """Most calls of reset or step that wait at the same time."""

    def __post_init__(self):
        for name in ("max_turns", "turn_tokens", "max_concurrent"):
            value = getattr(self, name)
            require(value is None or value > 0, f"task.environment.{name} must be positive, got {value}")
