"""The limits of a conversation with an environment."""

import dataclasses

from qerl.config.check import check_positive


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
        check_positive(self, "max_turns", "turn_tokens", "max_concurrent", prefix="task.environment.")
