"""A prompt and its samples while they are sampled: tokens, pages and states."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from qerl.engine.schedule.carried_cache import CachedSpan, CarriedCache
from qerl.engine.schedule.constraint import AllowedLog, TokenConstraint
from qerl.errors import UserError
from qerl.types import Prompt, Sampling


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class LiveGroup:
    """A prompt and its samples during one call."""

    index: int
    """Index of the prompt in this call."""
    prompt: Prompt
    coordinates: tuple[int, ...]
    """Seed coordinates before a sample's index: (seed, step, prompt.index), and for a branch its parent's."""
    prompt_tokens: int
    max_tokens: int
    """Maximum length of a sample."""
    samples_G: list["LiveSample"] = dataclasses.field(default_factory=list)
    num_unfinished: int = 0
    noise_row: int = 0
    """The prompt's row in the noise table of the norms."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """The prompt's pages, from admission until the last sample finishes."""
    window_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those of layers with a window that the token after the prompt sees, by place (window_pages.py)."""
    state: list[int] = dataclasses.field(default_factory=list)
    """Slot of the recurrent states after the prompt; empty if no layer has any. A branch has its parent's."""
    keeps_pages: bool = False
    """True if finished samples keep their pages, to be branched."""
    parent: "LiveSample | None" = None
    """The sample that this group branches; prompt_tokens then includes the shared tokens of that sample."""
    sampling: Sampling | None = None
    """Parameters of its own, in a LiveBatch."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sample besides the engine's, in a LiveBatch."""
    num_top_logprobs: int = 0
    """Most likely tokens that are reported with each sampled one."""
    episode: object | None = None
    """The episode whose later prompts may begin with this one and its answers, so that their pages are kept
    (kept_pages.py); None: no episode."""
    num_reused: int = 0
    """Number of the prompt's first tokens whose pages were kept."""
    carried: CarriedCache | None = None
    """The prompt's part of an earlier call's cache, until it is restored; None: it is computed."""
    on_prompt_hidden: Callable[[Tensor], None] | None = None
    """Called with the hidden states of the prompt's next tokens."""

    def __post_init__(self):
        assert self.prompt_tokens > 0 and self.max_tokens > 0

    @property
    def span(self) -> CachedSpan:
        """The prompt's positions and where they are cached."""
        return CachedSpan(range(self.prompt_tokens), self.pages, self.window_pages, self.state)

    @property
    def num_parent_tokens(self) -> int:
        """Number of the parent's first tokens that count as prompt."""
        return 0 if self.parent is None else self.prompt_tokens - self.parent.group.prompt_tokens


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class LiveSample:
    group: LiveGroup
    sample_index: int
    noise_row: int = 0
    """Row in the noise table of the norms."""
    tokens_T: list[int] = dataclasses.field(default_factory=list)
    logprobs_T: list[float] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    """Empty unless the sample is running, parked or resumed with its pages."""
    window_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those of layers with a window that are held, by their place in the sequence; with `pages`."""
    state: list[int] = dataclasses.field(default_factory=list)
    """Slot of its recurrent states, with its pages; empty if no layer has any."""
    is_running: bool = False
    environment_spans: list[range] = dataclasses.field(default_factory=list)
    """Index ranges in tokens_T written by an environment."""
    has_overrun: bool = False
    """True if the device has computed tokens after its last."""
    num_cached: int = 0
    """Number of positions in the pages of a parked sample."""
    carried: CarriedCache | None = None
    """Its own part of an earlier call's cache, until it is restored."""
    max_tokens: int = dataclasses.field(init=False)
    """Length at which its turn ends at the latest."""
    total_tokens: int = dataclasses.field(init=False)
    """Its maximum length, at most the group's."""
    finish: Literal["stop", "length"] | None = None
    routes: bytes | None = None
    """Experts of all computed positions when its latest turn ended, as in Sample; None without a mixture."""
    constraint: TokenConstraint | None = None
    allowed_V: Tensor | None = None
    """The tokens that the constraint allowed in place of the newest one; bool, on the CPU."""
    allowed_log: AllowedLog | None = None
    """The same for each of its tokens, if the request asks for it."""
    failure: UserError | None = None
    """Error that ends it."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The most likely tokens in place of the newest."""

    def __post_init__(self):
        self.max_tokens = self.total_tokens = self.group.max_tokens

    @property
    def age(self) -> tuple[int, int]:
        """Sort key; the oldest sample is the smallest."""
        return self.group.index, self.sample_index

    @property
    def num_positions(self) -> int:
        """Tokens of prompt and sample: cached positions after the newest token has been computed."""
        return self.group.prompt_tokens + len(self.tokens_T)

    @property
    def span(self) -> CachedSpan:
        """The positions of its tokens before the newest, and where they are cached."""
        positions = range(self.group.prompt_tokens, self.num_positions - 1)
        return CachedSpan(positions, self.pages, self.window_pages, self.state)

    @property
    def first_query(self) -> int:
        """Position of the first query that may still read its pages: the newest token's, or the first after
        the prompt if the sample may be branched."""
        return self.group.prompt_tokens if self.group.keeps_pages else self.num_positions - 1

    @property
    def turn_tokens_T(self) -> list[int]:
        """Tokens sampled in the current turn."""
        spans = self.environment_spans
        return self.tokens_T[spans[-1].stop :] if spans else self.all_tokens_T

    @property
    def all_tokens_T(self) -> list[int]:
        """Tokens of the sample, those shared with the parent of a branch included."""
        parent, n = self.group.parent, self.group.num_parent_tokens
        return self.tokens_T if parent is None else parent.tokens_T[:n] + self.tokens_T

    @property
    def all_logprobs_T(self) -> list[float]:
        parent, n = self.group.parent, self.group.num_parent_tokens
        return self.logprobs_T if parent is None else parent.logprobs_T[:n] + self.logprobs_T
