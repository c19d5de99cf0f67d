"""Data types shared by the parts of a run, and the letters that name tensor dimensions.

    P prompts in a step      G samples of one prompt     S samples kept for learning
    T tokens, packed         V vocabulary                D model width       F feed-forward width
    N query heads            K key/value heads           H head size         R LoRA rank        L layers

A suffix _P_G marks nested lists, possibly ragged; a suffix PG (or TV, TD) marks one tensor.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor  # takes seconds to import


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a task as the model sees it.

    Prompt(index=3, text="<|im_start|>user\\nWhat is 1 + 2?...", tokens_T=[1, 4093, ...],
           messages=[{"role": "user", "content": "What is 1 + 2?"}], columns={"answer": "3"})
    """

    index: int
    """Row index in the task. Together with (seed, step, sample) it determines the prompt's randomness."""
    text: str
    """The rendered prompt: chat template applied, special tokens written out."""
    tokens_T: list[int]
    messages: list[dict[str, Any]] | None
    """The conversation before rendering; None if the data set holds plain text. Contents are texts."""
    columns: dict[str, Any]
    """The row's other columns, passed to reward functions by name."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TeacherLogprobs:
    """Logprobs by a teacher of the C sampled tokens of a sample; in host memory, fp32 and int64."""

    logprob_C: "Tensor"
    """Logprobs of the tokens themselves."""
    ids_CK: "Tensor | None" = None
    """The teacher's most likely tokens at each place; None where only logprob_C is needed."""
    outcomes_CX: "Tensor | None" = None
    """Logprobs of these tokens, then of all others together; X = K + 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that a grammar allowed in place of each of a sample's C sampled tokens.

    AllowedTokens(sets=(b"\\x05",), set_C=[None, 0]): any token, then token 0 or 2.
    """

    sets: tuple[bytes, ...]
    """One bit for each token of the vocabulary; token 0 is the lowest bit of the first byte."""
    set_C: list[int | None]
    """Index in `sets`; None: every token was allowed."""

    def of(self, places: slice) -> "AllowedTokens":
        """Return the same for these tokens only."""
        return AllowedTokens(self.sets, self.set_C[places])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One run of an agent, with what the model did in it."""

    parts: tuple["Group", ...]
    """The samples that are learned from, each in a group of its own: calls whose prompt extends an earlier
    one are one sample; others have prompts and samples of their own."""
    num_turns: int
    """Answers of the model."""
    num_tool_calls: int
    """Results of tools that the model was given."""
    num_tool_failures: int
    """Results among them that say that they are an error."""
    waiting_share: float
    """Share of the episode's time in which no call of the model was running."""
    metrics: dict[str, float]
    """The agent's own, by name."""
    num_malformed_calls: int = 0
    """Calls in answers that could not be read, or that call no function of the request."""
    turn_starts: tuple[int, ...] = ()
    """Numbers of tokens sampled before each answer from which a branch of the episode may begin."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One completion: produced by the engine, then given a reward and an advantage.

    Sample(tokens_T=[35, 2], logprobs_T=[-0.1, -0.02], text="3", finish="stop", version=7, reward=1.0)
    """

    tokens_T: list[int]
    """Sampled tokens including the stop token, and an environment's tokens between turns. The first and the
    last token are always sampled."""
    logprobs_T: list[float]
    """Natural log of each sampled token's probability under the policy that sampled it, noise included."""
    text: str
    """Detokenized text without special tokens, cut before a stop string. In a multi-turn sample each message
    starts on a new line with its role."""
    finish: Literal["stop", "length"]
    version: int
    """Number of learner updates that the sampling policy had taken; the last one of `versions`."""
    versions: tuple[tuple[int, int], ...] = ()
    """(version, number of its tokens) of each policy in turn, if several steps sampled it; else empty."""
    sample_index: int = 0
    """Index in its group when it was sampled; a branch has the index of the sample it branches from. Selects
    the noise if that is per sample."""
    reward: float | None = None
    """None if the reward failed: the sample is then not learned from."""
    advantage: float = 0.0
    environment_spans: tuple[range, ...] = ()
    """Index ranges in tokens_T written by an environment: they have no logprob, loss, entropy or KL."""
    messages: list[dict[str, str]] | None = None
    """Messages after the prompt, turn by turn; None without an environment."""
    allowed: AllowedTokens | None = None
    """The tokens that a grammar allowed; logprobs are those of the choice among them. None: no grammar."""
    routes: bytes | None = None
    """The experts that a mixture sent each row to: one byte an expert, those of a layer ascending, layer
    by layer, for each token of the prompt and of the sample but its last. None: not recorded."""
    failure: tuple[str, str] | None = None
    """(cause, message) if the environment or the agent failed: the sample then gets no reward."""
    episode: Episode | None = None
    """The agent's, whose parts are learned from in place of this sample; tokens_T and logprobs_T are those of
    all parts."""
    teacher: TeacherLogprobs | None = None
    """In distillation; None if the teacher failed: the sample is then not learned from."""
    is_demonstration: bool = False
    """True if no policy sampled it: a row to imitate, whose logprobs_T mean nothing."""

    @property
    def sampled_indices(self) -> list[int]:
        """Indices in tokens_T of the sampled tokens."""
        if not self.environment_spans:
            return list(range(len(self.tokens_T)))
        skipped = {index for span in self.environment_spans for index in span}
        return [index for index in range(len(self.tokens_T)) if index not in skipped]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The policy's output in one turn of a conversation.

    Turn(index=0, sample_index=3, tokens_T=[812, 2], text="7", finish="stop", num_left=120)
    """

    index: int
    """The prompt's index in the call."""
    sample_index: int
    tokens_T: list[int]
    text: str
    finish: Literal["stop", "length"]
    num_left: int
    """Number of tokens the sample may still grow by."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Answers the policy's turns on behalf of the environments."""

    turn_tokens: int | None
    """Maximum tokens of one turn; None: limited by the sample's maximum only."""
    answer: Callable[[list[Turn]], list[list[int] | None]]
    """Return the 1 to num_left - 1 tokens that follow each turn; None ends the sample."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The samples of one prompt, whose rewards are compared with each other."""

    prompt: Prompt
    samples_G: list[Sample]
    prefix_tokens: int = 0
    """If not 0, the samples are branches that share this many first tokens with the branched sample; sampled
    tokens of an agent's episode."""
    is_after_pivot: bool = False
    """True if the samples are branches without the tokens before their pivot, which are in the prompt."""
    num_sampled: int | None = None
    """Number of samples that the group counts as in means over samples; None: config.num_generations."""

    @property
    def is_branch(self) -> bool:
        return self.prefix_tokens > 0 or self.is_after_pivot


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedSample:
    """A sample as a step leaves it, to be continued by a later one.

    UnfinishedSample(tokens_T=[35, 17], logprobs_T=[-0.1, -0.6], versions=((7, 2),))
    """

    tokens_T: list[int] = dataclasses.field(default_factory=list)
    logprobs_T: list[float] = dataclasses.field(default_factory=list)
    """As in Sample: each under the policy that sampled the token."""
    versions: tuple[tuple[int, int], ...] = ()
    """As in Sample, of one version too."""
    finish: Literal["stop", "length"] | None = None
    """None: not finished."""
    routes: bytes | None = None
    """As in Sample, once it is finished."""
    cache: Any = dataclasses.field(default=None, compare=False, repr=False)
    """Its part of the engine's cache (engine/schedule/carried_cache.py); None: it is computed again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedGroup:
    """A prompt and its samples as a step leaves them."""

    prompt: Prompt
    seed_step: int
    """The step in the coordinates of its random numbers, whichever step samples a token."""
    samples_G: list[UnfinishedSample]
    cache: Any = dataclasses.field(default=None, compare=False, repr=False)
    """The prompt's part, likewise."""

    @property
    def is_complete(self) -> bool:
        return all(sample.finish is not None for sample in self.samples_G)

    @property
    def cache_bytes(self) -> int:
        """Host memory of the caches."""
        return sum(each.cache.num_bytes for each in (self, *self.samples_G) if each.cache is not None)

    def without_cache(self) -> "UnfinishedGroup":
        samples_G = [dataclasses.replace(sample, cache=None) for sample in self.samples_G]
        return dataclasses.replace(self, samples_G=samples_G, cache=None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pivot:
    """A position at which a sample is branched.

    Pivot(group_index=0, sample_index=3, prefix_tokens=20): after the first 20 of its tokens.
    """

    group_index: int
    """Index of the sample's group among the groups sampled together."""
    sample_index: int
    prefix_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """Contiguous rows of a prompt and its branches in a packed batch: the prompt first, then each branch.

    A branch token attends to the prompt, the earlier tokens of its own branch and itself; to no other branch.
    Tree(start=10, prompt_tokens=5, branch_tokens=(3, 0, 2)) covers rows 10..19. A plain sequence is a tree
    with no branch or one.
    """

    start: int
    prompt_tokens: int
    branch_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + sum(self.branch_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy: the arg max, its logprob taken at temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    """Strings that end a sample when they appear in its text."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompts to sample in one call of an engine, how, and the seed coordinates of their tokens.

    GenerateRequest(prompts_P, num_samples=8, sampling=Sampling(max_tokens=512), seed=0, step=3)
    """

    prompts_P: list[Prompt]
    _: dataclasses.KW_ONLY
    num_samples: int
    """Samples of each prompt."""
    sampling: Sampling
    seed: int
    step: int
    max_tokens_P_G: list[list[int]] | None = None
    """Each sample's own maximum length, within sampling.max_tokens; None: that of all."""

    def with_prompts(self, prompts_P: list[Prompt]) -> "GenerateRequest":
        """Return the same request for other prompts, or for a part of these."""
        assert self.max_tokens_P_G is None  # belongs to the prompts
        return dataclasses.replace(self, prompts_P=prompts_P)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its logprob; top: the most likely tokens in its place with theirs, if asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Report = Callable[[int, int, str], None]
"""Called with (done, total, unit) while a long piece of work goes on: (3, 28, "layers")."""
OnBurst = Callable[[list[tuple[int, Group]]], None]
"""Called after each burst of decode steps with (index of the prompt in the call, its group) of each group
that has ended in it, so often with an empty list."""


class RolloutEngine(Protocol):
    """The interface of an engine to the training loop: local, data-parallel, multi-turn or remote."""

    def generate(self, request: GenerateRequest, *, on_burst: OnBurst | None = None) -> list[Group]:
        """Return the samples of each prompt, in order. on_burst is not called by engines that learn only at
        the end what a sample is: those of environments, agents, Ray and endpoints."""
        ...

    def publish(self, version: int) -> None:
        """Sample from the learner's current weights from now on, under this version number."""

    def take_metrics(self) -> dict[str, float]:
        """Return, and reset, the engine's own metrics of the step's calls so far."""
        ...
