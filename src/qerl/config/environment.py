"""The limits of a conversation with an environment."""

import dataclasses

from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig:
    """Used if one of task.rewards is an environment. sample.max_tokens limits all turns and replies
    together."""

    max_turns: int = 8
    """Maximum number of turns; the sample then ends with the rewards so far."""

    turn_tokens: int | None = None
    """Maximum length of one turn; None: sample.max_tokens. A truncated turn is answered too."""

    max_concurrent: int = 256
    """Maximum number of calls of reset or step that wait at the same time."""

    def __post_init__(self):
        for name in ("max_turns", "turn_tokens", "max_concurrent"):
            value = getattr(self, name)
            require(value is None or value > 0, f"task.environment.{name} must be positive, got {value}")
