"""What passes between the parts of a run, and the letters that name its dimensions.

    P prompts in a step      G samples of one prompt     S samples kept for learning
    T tokens, packed         V vocabulary                D model width       F feed-forward width
    N query heads            K key/value heads           H head size         R LoRA rank        L layers

A trailing _P_G marks nested lists, possibly ragged; a trailing PG (or TV, TD) marks one tensor.
"""

import dataclasses
from typing import Any, Literal, Protocol


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a task, as the model is to see it.

    Prompt(index=3, text="<|im_start|>user\\nWhat is 1 + 2?...", tokens_T=[1, 4093, ...],
           messages=[{"role": "user", "content": "What is 1 + 2?"}], columns={"answer": "3"})
    """

    index: int
    """Its place in the task: names the prompt's randomness together with (seed, step, sample)."""
    text: str
    """The rendered prompt: chat template applied, special tokens written out."""
    tokens_T: list[int]
    messages: list[dict[str, str]] | None
    """The conversation before rendering; None where the data set holds plain text."""
    columns: dict[str, Any]
    """The row's other columns; a reward function gets them by name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion as the engine produced it, then as the task and the algorithm marked it.

    Sample(tokens_T=[35, 2], logprobs_T=[-0.1, -0.02], text="3", finish="stop", version=7, reward=1.0)
    """

    tokens_T: list[int]
    """What was sampled, the stop token included, and what an environment put between its turns. The first
    and the last one were sampled."""
    logprobs_T: list[float]
    """Natural log of each sampled token's probability under the policy that sampled it, noise and all."""
    text: str
    """The tokens as text without special tokens, cut before a stop string; of turns, a line on who speaks."""
    finish: Literal["stop", "length"]
    version: int
    """How many learner updates that policy had taken."""
    sample_index: int = 0
    """Its place in its group as it was drawn, or of a branch the branched sample's: names its noise where
    that is by sample."""
    reward: float | None = None
    """None where the reward failed: the sample then teaches nothing."""
    advantage: float = 0.0
    given: tuple[range, ...] = ()
    """Where in tokens_T an environment's tokens lie, which nobody sampled: no loss, no entropy, no KL."""
    messages: list[dict[str, str]] | None = None
    """What followed the prompt, turn by turn, where there was an environment."""
    failure: tuple[str, str] | None = None
    """(cause, message) where the environment failed: the sample then gets no reward."""

    @property
    def places(self) -> list[int]:
        """Where in tokens_T the sampled tokens lie."""
        if not self.given:
            return list(range(len(self.tokens_T)))
        given = {place for places in self.given for place in places}
        return [place for place in range(len(self.tokens_T)) if place not in given]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a policy said in a conversation until it ended or was cut.

    Turn(index=0, sample_index=3, tokens_T=[812, 2], text="7", finish="stop", num_left=120)
    """

    index: int
    """The prompt's place in the call."""
    sample_index: int
    tokens_T: list[int]
    text: str
    finish: Literal["stop", "length"]
    num_left: int
    """Tokens that the sample may still have."""


class Conversation(Protocol):
    """Whom the engine asks how its samples go on."""

    turn_tokens: int | None
    """Most tokens of a turn; None: as many as the sample may have."""

    def answer(self, turns: list[Turn], /) -> list[list[int] | None]:
        """The tokens that follow each turn, from 1 to num_left - 1; None where the sample is over."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The samples of one prompt: what a reward is compared within."""

    prompt: Prompt
    samples_G: list[Sample]
    prefix_tokens: int = 0
    """Not 0: these are branches, and so many first tokens of each are the sample's that was branched."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pivot:
    """Where a sample is branched.

    Pivot(group_index=0, sample_index=3, prefix_tokens=20): after the first 20 of its tokens.
    """

    group_index: int
    """Its group's place among those that were drawn together."""
    sample_index: int
    prefix_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Where a prompt and its branches lie in a packed batch: contiguous, the prompt first, then each branch.

    A branch token sees the prompt, the earlier tokens of its own branch and itself; no other branch.
    Tree(start=10, prompt_tokens=5, branch_tokens=(3, 0, 2)) covers rows 10..19. A plain sequence is a tree
    without branches, or with one.
    """

    start: int
    prompt_tokens: int
    branch_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + sum(self.branch_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy: the arg max, its logprob taken at temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    """Strings that end a sample when they appear in its text."""


class Engine(Protocol):
    def generate(
        self, prompts_P: list[Prompt], *, num_samples: int, sampling: Sampling, seed: int, step: int
    ) -> list[Group]: ...

    def publish(self, version: int) -> None:
        """Sample from the learner's weights as they now are, under this version number."""

    def take_metrics(self) -> dict[str, float]:
        """Of the step's calls so far, beside what its samples tell."""
        ...


class Learner(Protocol):
    version: int

    def step(self, groups: list[Group]) -> dict[str, float]:
        """Learn from the groups' samples with their advantages; one or more optimizer updates."""
        ...
