"""The order longest_first of a step's prompts (rollout.prompt_order), by each prompt's own history.

The last samples of a step run with few rows beside them, so the longest ones should begin first (longest
processing time first, Graham, 1969). A prompt that was not sampled before is expected to be as long as the
mean of those that were. The order changes when a sample runs, not what is sampled but for rounding.
"""

from statistics import fmean

from qerl.types import Group, Prompt


class PromptLengths:
    """The mean length of the latest samples of each prompt, in tokens."""

    def __init__(self):
        self._mean: dict[int, float] = {}

    def expected(self, prompt: Prompt) -> float:
        return self._mean.get(prompt.index, fmean(self._mean.values()) if self._mean else 0.0)

    def add(self, groups: list[Group]) -> None:
        self._mean |= {g.prompt.index: fmean(len(s.tokens_T) for s in g.samples_G) for g in groups}

    def state(self) -> dict[str, float]:
        """Return what a checkpoint stores, as JSON values."""
        return {str(index): mean for index, mean in self._mean.items()}

    def load(self, state: dict[str, float]) -> None:
        self._mean = {int(index): mean for index, mean in state.items()}


def longest_first(prompts_P: list[Prompt], lengths: PromptLengths) -> list[int]:
    """Return the prompts' indices in the order of sampling; equal ones keep theirs."""
    return sorted(range(len(prompts_P)), key=lambda i: -lengths.expected(prompts_P[i]))
