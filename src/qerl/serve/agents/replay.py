"""Play an agent's episode again up to one of its calls: the beginning of a branch (DEEP-GRPO).

    episode             call 1  answer 1    call 2  answer 2     call 3  answer 3
    branch at call 3    call 1  answer 1    call 2  answer 2     call 3  sampled anew

The agent runs from its beginning. The endpoint answers its calls with the recorded tokens as long as they are
the recorded calls; from the pivot on the engine samples. Only what is sampled is learned from.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

from qerl.serve.batcher import PendingRequest
from qerl.serve.fields import ApiError
from qerl.tasks.scoring import Failure
from qerl.types import Sample, Sampling

_OTHER_CALLS = Failure(
    "not deterministic", "the agent's calls of the model differed when a branch replayed its episode"
)


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class AnsweredCall:
    """A call of the model with its answers so far."""

    prompt_T: list[int]
    num_choices: int
    sampling: Sampling
    is_constrained: bool
    """True if a grammar restricts the answers."""
    is_repeatable: bool
    """False if answers come with the logprobs of other tokens or of the prompt, which are not recorded."""
    may_branch: bool
    """True if all earlier calls could be replayed when this one arrived."""
    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, pending: PendingRequest, *, may_branch: bool) -> "AnsweredCall":
        return cls(
            prompt_T=pending.prompts_P[0].tokens_T,
            num_choices=pending.num_choices,
            sampling=pending.sampling,
            is_constrained=pending.constraint is not None,
            is_repeatable=pending.num_top_logprobs == 0 and pending.prompt_logprobs_P is None,
            may_branch=may_branch,
        )

    @property
    def can_replay(self) -> bool:
        return self.is_repeatable and len(self.samples) == self.num_choices

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(sample.tokens_T) for sample in self.samples.values())

    def is_same(self, other: "AnsweredCall") -> bool:
        """True if the other call has this prompt and asks for as many answers, sampled alike."""
        return (self.prompt_T, self.num_choices, self.sampling, self.is_constrained) == (
            other.prompt_T,
            other.num_choices,
            other.sampling,
            other.is_constrained,
        )


def turn_starts(calls: Sequence[AnsweredCall]) -> dict[int, int]:
    """Return the indices of the calls, but the first, from which a branch may begin, by the number of tokens
    that were sampled before each. calls: in the order in which they came."""
    starts, num_tokens = {}, 0
    for index, call in enumerate(calls):
        if num_tokens and call.may_branch and call.samples:
            starts[num_tokens] = index
        num_tokens += call.num_tokens
    return starts


def calls_before(calls: Sequence[AnsweredCall], num_tokens: int) -> list[AnsweredCall]:
    """Return the calls before one of their `turn_starts`."""
    return list(calls[: turn_starts(calls)[num_tokens]])


class Replay:
    """The calls before a branch's pivot. Not thread-safe: requests are parsed one after the other."""

    def __init__(self, calls: Sequence[AnsweredCall], branch: int):
        """branch: number of the branch among those of its pivot."""
        self.branch = branch
        self._left, self._is_other = deque(calls), False

    @property
    def failure(self) -> Failure | None:
        """Return why the episode is no branch, once it is over."""
        return _OTHER_CALLS if self._left or self._is_other else None

    def answers(self, pending: PendingRequest) -> list[Sample] | None:
        """Return the recorded answers to the next call; None from the pivot on. Raise ApiError if it is
        none of the recorded calls. Calls that ran beside each other may come in another order."""
        call = AnsweredCall.of(pending, may_branch=False)
        recorded = next((each for each in self._left if each.is_same(call)), None)
        self._is_other |= bool(self._left) and recorded is None
        if self._is_other:
            raise ApiError(400, _OTHER_CALLS.message, code="not_deterministic")
        if recorded is None:
            return None
        self._left.remove(recorded)
        return [recorded.samples[choice] for choice in range(recorded.num_choices)]
