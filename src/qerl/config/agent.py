"""Agents: code of the user that talks to the model through an endpoint and returns a reward."""

import dataclasses

from qerl.config.check import check_positive
from qerl.errors import require


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Used if `function` is set: docs/agent.md. sample.max_tokens then limits one answer of the model."""

    function: str | None = None
    """module:function or file.py:function, async or not, that is called for every sample with a client of the
    endpoint and the row, and returns the reward; it replaces task.rewards. verifiers:NAME or openenv:PLACE,
    as task.name, is an agent that plays that environment. None: no agent."""

    context_tokens: int = 8192
    """Longest prompt and answer of one call together, in tokens; the model's positions if those are fewer."""

    max_calls: int = 1000
    """Maximum number of calls of the model in one episode; more are refused."""

    max_concurrent: int = 256
    """Maximum number of episodes that run at the same time."""

    kept_pages_fraction: float = 0.5
    """Largest fraction of the KV cache's pages that keep prompts and answers for an episode's next call
    (prefix caching). They are freed when a request needs them. 0: each call computes its whole prompt."""

    call_timeout_s: float = 300.0
    """A call of the model that takes longer than this fails."""

    tool_timeout_s: float | None = None
    """A tool call, or another step, of an environment of verifiers or OpenEnv fails after this time.
    None: the package's limit, 600 or 60. An agent of your own limits its tools itself."""

    episode_timeout_s: float = 900.0
    """An episode that takes longer than this is stopped: its sample gets no reward."""

    step_timeout_s: float | None = None
    """Episodes that are not over this long after the step's first began are stopped; None: each has only
    its own limit."""

    max_body_bytes: int = 4_194_304
    """Maximum size of one request, in bytes."""

    def __post_init__(self):
        check_positive(self, "context_tokens", "max_calls", "max_concurrent", prefix="agent.")
        check_positive(self, "call_timeout_s", "episode_timeout_s", "max_body_bytes", prefix="agent.")
        share = self.kept_pages_fraction
        require(0 <= share <= 1, f"agent.kept_pages_fraction must be in [0, 1], got {share}")
        check_positive(self, "step_timeout_s", "tool_timeout_s", prefix="agent.")
